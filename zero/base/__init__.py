"""What every room may use: keys and their checks, errors, versions of packages, columns of text, child processes."""
