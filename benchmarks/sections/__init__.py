"""The sections of the benchmark, one file each: what is measured, the targets, the tables and the pictures.

A section is a module with

    ORDER, TITLE, WHAT      its place in the report, its heading, and a paragraph on what its figures mean
    measure(bench)          returns the figures, as a dict that JSON can store; `bench` is a `harness.section.Bench`
    targets(figures)        optional: the claims, as `harness.targets.Target`s
    tables(figures)         optional: `harness.tables.Table`s
    pictures(figures)       optional: `harness.pictures.Picture`s

The runner imports every module of this folder. Code that must run in a fresh process is in the same file, under
`if __name__ == "__main__"`, and is started by `harness.probe.ask`.
"""
