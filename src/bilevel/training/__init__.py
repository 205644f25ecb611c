"""Long runs of any job: folder, checkpoints, early stopping, logs, several processes."""
