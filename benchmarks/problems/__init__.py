"""The benchmark's objectives, written once per array library so that every contestant differentiates the same
numbers."""
