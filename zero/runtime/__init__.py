"""Files, networks, processes and the terminal; about one outside library per file."""
