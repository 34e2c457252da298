"""The deciders of the control plane on a message bus, in virtual time."""
