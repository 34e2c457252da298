"""Worker process: the code around the user's code, and its channel to the agent."""
