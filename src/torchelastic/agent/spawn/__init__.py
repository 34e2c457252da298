"""Agent and zygote: where a node's processes come from, warm from the zygote or plain.

factory            the zygote while it can, plain processes otherwise
zygote_client      the agent's side of the zygote; zygote_server: the zygote itself
zygote_child       a fork of the zygote becomes a worker
processes          plain processes; run_program: helper programs with a time limit
store_host_client  the process that holds the workers' TCPStores
helper_restarts    restarts the zygote and the store host
startup/           how our code gets into `python -u train.py`
"""
