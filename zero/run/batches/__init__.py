"""How many sequences the batch of each step has: `table.py` lists the schedules."""
