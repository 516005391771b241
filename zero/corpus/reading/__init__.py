"""Token shards to batches: index files, the order of the rows, reading them from disks and buckets."""
