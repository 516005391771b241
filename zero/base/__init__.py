"""What every room may use: errors, versions of packages, columns of text, child processes."""
