"""Command line: turn a job into what a scheduler takes; one renderer per platform."""
