"""Command line: the flags, how they are parsed, checked and explained."""
