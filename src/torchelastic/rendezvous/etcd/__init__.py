"""Agent process: the store at an etcd server, through the JSON form of its v3 API.

etcd_store       the `Store` protocol; opens and closes a job, and removes finished ones
connection_pool  calls and streams over connections that may break, with retries
etcd_messages    requests and responses, pure
settings         those of --rdzv-conf and URLs
"""
