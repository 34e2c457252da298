"""Any process: a node's membership in a job: session, record, lease, and its driver.

member_session    joins the job: lease, member record, leadership, worlds
backend           the embedded store or etcd, behind one interface
lease             this process's lease, and when it is lost
suspicion         checks of suspected nodes, and probes of all, where the store is slow to notice
node_driver       drives a node without an agent: standalone processes, the plug-in for torchrun
"""
