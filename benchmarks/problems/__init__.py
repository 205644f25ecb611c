"""The objectives of the benchmark, written once per array library. All contestants differentiate the same functions of
the same data."""
