"""A corpus as it is stored: shards of rows, index files that list them, and the manifest of its directory."""
