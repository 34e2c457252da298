"""Agent process: connections between agents: frames, authentication, TLS, addresses."""
