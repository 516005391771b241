"""Filters: what leaves documents out of a corpus. `table.py` lists them."""
