"""Trained models in use: evaluation, sampling, and the adapter for lm-evaluation-harness."""
