"""Token shards to batches: in one order on any number of hosts, from any cursor."""
