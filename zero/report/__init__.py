"""The pages and pictures of runs, drawn from the files in their directories."""
