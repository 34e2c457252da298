#!/usr/bin/env bash
# The command of a container on Run:ai. `exec` makes torchelastic process 1 of the container: Run:ai's
# SIGTERM reaches it, the node leaves in order, and its exit code (143) is that of the container.
exec torchelastic run "$@"
