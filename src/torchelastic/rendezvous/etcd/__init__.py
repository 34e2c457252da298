"""Agent process: the store at an etcd server, through the JSON form of its v3 API.

etcd_store       the `Store` protocol
connection_pool  calls and streams over connections that may break, with retries
http_connection  one HTTP/1.1 connection
etcd_messages    requests and responses, pure
watch_events     the changes that a watch has yet to deliver, pure
cleanup          the removal of finished jobs
"""
