"""Tests: the whole control plane on virtual event loops, with connections in memory."""
