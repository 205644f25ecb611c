"""Few-shot learners: one file each. What they share, training them, judging them and keeping them, has files beside."""
