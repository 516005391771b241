"""A training run: how it is found, set up and resumed, and its state between steps."""
