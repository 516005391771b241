"""A training run: finding it, setting it up, its state between steps, and resuming it."""
