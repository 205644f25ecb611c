"""Where tasks come from: minibatches by step number, hold-out splits, folds."""
