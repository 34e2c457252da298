"""Only the errors."""
