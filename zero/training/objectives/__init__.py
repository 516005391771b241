"""What a step minimizes: `table.py` lists the objectives."""
