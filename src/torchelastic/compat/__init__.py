"""Any process: APIs of torchelastic 0.1 and 0.2, and the rendezvous for stock torchrun.

old_names        every public name of 0.1 and 0.2, which import paths they have, what differs
agent_api        `agent.server`: a job from a `WorkerSpec`
rendezvous_api   `rendezvous`: handlers, their registry and parameters
multiprocessing_api  `multiprocessing`: processes of this machine without a job
collectives      `distributed` of 0.1, `utils.store` of 0.2
data_utilities   `utils.data`;  random_kills: `fault_injection` of 0.1
torchrun/        our rendezvous for torchrun's own agent
"""
