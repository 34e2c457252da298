"""What tests of a job are made of: the checker of the laws, and the simulated control plane."""
