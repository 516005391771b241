"""The reports of a run: metrics, W&B, plots, the HTML report."""
