"""The event log: what happened in a job and why, written by every agent, read by everything else.

types (what can happen) -> log (write and read lines) -> view (what the lines say about a job).
"""
