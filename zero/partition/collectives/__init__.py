"""Collectives inside pmap: axis and groups, one array, many small arrays, and their order on CPU."""
