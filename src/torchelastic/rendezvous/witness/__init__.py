"""The witness: storage that holds one vote in every electorate that would be even (`--witness`).

`storage` reads and writes it, in a process of its own; `asking` is the agent's end of that process;
`jury` knows which job it is, and claims votes. Which votes count is `succession`'s to say.
"""
