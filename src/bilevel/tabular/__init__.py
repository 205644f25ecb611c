"""Tables: reading and checking them, tuning a model's penalties, comparing it, saving it, predicting with it."""
