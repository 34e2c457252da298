"""Worker process: what runs around the user's code, and its channel to the agent."""
