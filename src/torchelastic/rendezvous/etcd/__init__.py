"""Agent process: the store at an etcd server, by the JSON form of its v3 API.

etcd_store       the `Store` protocol
connection_pool  calls and streams over connections that may break, with retries
http_connection  one HTTP/1.1 connection
etcd_messages    requests and responses, pure
watch_events     what a watch has reported and has yet to report, pure
cleanup          what a finished job leaves behind, and who removes it
"""
