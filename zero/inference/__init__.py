"""Inference with trained models: evaluation, sampling, and the adapter for lm-evaluation-harness."""
