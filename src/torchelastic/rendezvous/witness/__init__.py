"""The witness: storage that holds one vote in every electorate that would be even (`--witness`).

`storage` reads and writes it, in a process of its own; `asking` is the agent's end of that process;
`vote_keys` knows which run of the job it is, and claims votes; `reachability` looks whether it
answers. Which votes count is for `succession` to say.
"""
