"""The configuration: read, composed and checked before anything starts."""
