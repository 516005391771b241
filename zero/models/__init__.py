"""Models that know nothing of sharding."""
