"""Processes and their devices: start-up, agreement, failure detection, signals."""
