"""What a command line starts: the composed configuration and its modes, the doctor, the check of a program."""
