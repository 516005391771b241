"""Causal attention: what scores are made of, and the forms that compute the same result."""
