"""Agent process: the output of workers and of the agent itself, in files and on the terminal."""
