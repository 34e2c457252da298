"""Agent process: storage that holds one vote in every even electorate (`--witness`).

witness_storage reads and writes it, in a process of its own; witness_client is the agent's end of
that process; vote_keys knows which run of the job this is, and claims votes; reachability checks
now and then that it answers. Which votes count is decided by `majority`.
"""
