"""A campaign of faults: damaged and forged files, kills at any moment, full disks.

Every end must be a right load or a sentence. The short form is a test. The long form: `make faults`, or
`PYTHONPATH=tests python -m faults`.
"""
