"""Processes full of agents for `rendezvous.py`: one module per system, the same orders for both."""
