"""Worker process: undo the step in flight, so that it can be taken again."""
