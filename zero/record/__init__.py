"""What a run leaves in its directory, and how others read it: its files, its metrics, its evaluations."""
