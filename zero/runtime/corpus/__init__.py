"""Text to token shards: preparation, verification and the manifest of a corpus."""
