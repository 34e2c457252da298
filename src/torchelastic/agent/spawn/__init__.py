"""Agent and zygote: where a node's processes come from, warm from the zygote or plain.

helper_processes   the zygote and the store host: started, used and replaced
zygote_client      the agent's side of the zygote
zygote_server      the zygote itself; a fork of it becomes a worker
preload_probe      how much of a module the zygote can import, if not all of it
processes          plain processes; run_program: helper programs with a time limit
startup/           how our code gets into `python -u train.py`
"""
