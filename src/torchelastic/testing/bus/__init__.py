"""Tests: the deciders of the control plane on a message bus, in virtual time."""
