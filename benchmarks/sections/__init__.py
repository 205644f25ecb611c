"""The sections of the benchmark, one file each: what is measured, what was hoped for, and how it is shown.

A section is a module with

    ORDER, TITLE, WHAT      its place in the report, its heading, and a paragraph on what its figures mean
    measure(bench)          the figures, as something JSON can hold; `bench` knows how long to measure
    targets(figures)        optional: claims held against the figures (`harness.targets`)
    tables(figures)         optional: `harness.tables.Table`s
    pictures(figures)       optional: `harness.pictures.Picture`s

and is found by walking this folder. What must be measured in a fresh process stands in the same file, under
`if __name__ == "__main__"`, and is run by `harness.probe.ask`.
"""
