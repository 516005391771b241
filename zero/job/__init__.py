"""Turns sections of the configuration into a model on devices, its optimizer and its programs."""
