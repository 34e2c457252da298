"""Worker process: the process group of a world, with waits that an abort can end."""
