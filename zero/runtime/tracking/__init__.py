"""What a run reports: metrics, W&B, plots, the HTML report."""
