"""The parts of the benchmark: cases, environments, workers, timing, memory, targets and the report."""
