"""The configuration: every key declared and checked once, before anything starts."""
