"""Launching process: APIs of torchelastic 0.2 that the rest of the package does not need.

agent_api             an agent: a job from a `WorkerSpec`, thin over the launcher
rendezvous_api        the rendezvous handler of a node, and the registry of backends
etcd_rendezvous       the rendezvous at an etcd server
multiprocessing_api   the names of 0.2's `multiprocessing`
store_exchange        data that the ranks exchange through a store
"""
