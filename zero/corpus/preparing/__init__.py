"""Text to token shards: reading documents, tokenizing them, writing shards with a manifest and index files."""
