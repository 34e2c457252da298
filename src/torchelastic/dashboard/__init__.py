"""Dashboard process: a read-only page that shows a job, made from its event logs.

access        who may see the page, pure
responses     the response to each request; the page itself, from `static/`
job_state     the state of the job for the page (`events.analysis.view`), once for all viewers
page_server   listens at an address and serves the page
"""
