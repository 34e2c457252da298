"""Dashboard process: a page that shows a job, read-only, made from its event logs.

access        who may see the page, pure
responses     the answer to a request, pure
static_files  the page itself, from `static/`
job_state     the job as the page shows it, made once for all viewers
page_server   the sockets; start: from an address and a token to a running page
"""
