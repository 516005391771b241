"""Weights in and out of zero: Hugging Face folders, warm starts, averages."""
