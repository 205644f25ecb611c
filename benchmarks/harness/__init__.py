"""What the benchmark is made of: cases, environments, workers, timing, memory, targets and the report."""
