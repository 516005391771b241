"""The objectives that a step can minimize; `table.py` lists them."""
