"""A random search for hypergradients that are wrong without a word.

The short form is a test. The long form: `PYTHONPATH=tests python -m search --problems 10000`, or `make search`.
"""
