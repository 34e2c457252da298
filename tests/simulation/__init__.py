"""The simulated control plane: see `docs/concepts/simulation.md`."""
