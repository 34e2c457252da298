"""A page that shows a job: read-only, over its event logs, in a process of its own.

door      who is let in (pure)
answers   what a request gets (pure)
files     the page itself, as it lies in `static/`
pictures  the job as it stands, made once for all who look
server    the sockets
"""
