"""Tests: the checker of the laws of a job, for simulation, chaos runs and soaks."""
