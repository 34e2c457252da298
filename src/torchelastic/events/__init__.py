"""The event log: what happened in a job and why, written by every agent, read by everything else.

types (what can happen) -> record (a line) -> log (files) -> merge (one story out of several)
    -> view (what the story says about a job; with ranks, recoveries, goodput)
    -> words (in sentences), trace (as a drawing), places (who had which rank)
"""
