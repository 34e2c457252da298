"""Tests: the checker of the laws, and the simulated control plane."""
