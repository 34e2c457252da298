"""Any process: Linux calls, memory limits, cgroups, processes that die with their owner."""
