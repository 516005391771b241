"""Collectives of zero, inside pmap: the axis and its groups, one array, many small ones, tensor groups, their order."""
