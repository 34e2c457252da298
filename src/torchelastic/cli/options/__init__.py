"""Command line: the flags, their parser, checks and help."""
