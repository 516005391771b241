"""Models, without any sharding."""
