"""All that touches the world: files, networks, processes, the terminal. One outside library a file."""
