"""Agent process: the store at an etcd server, through the JSON form of its v3 API.

etcd_store       the `Store` protocol
connection_pool  calls and streams over connections that may break, with retries
etcd_messages    requests and responses, pure
watch_events     the changes that a watch has not delivered yet, pure
settings         those of --rdzv-conf and URLs; etcd_tls: TLS from its files
open_store       opens and closes it, and removes finished jobs
"""
