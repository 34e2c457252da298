"""Agent process: storage that has one vote in every even electorate (`--witness`).

witness_storage reads and writes it, in its own process; vote_keys is the agent's end of that
process: it finds the run of the job, claims votes, and checks now and then that storage answers.
`majority` decides which votes count.
"""
