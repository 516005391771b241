"""Where the metrics of a run go: its file, W&B, TensorBoard; and the clock of its phases."""
