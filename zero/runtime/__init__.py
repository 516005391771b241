"""All that touches the world: files, networks, processes, the terminal; about one outside library per file."""
