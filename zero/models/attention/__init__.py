"""Causal attention: the form of scores, and implementations with the same result."""
