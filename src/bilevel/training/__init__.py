"""What a long run needs, whatever it learns: a folder, checkpoints, stopping, logging, several processes."""
