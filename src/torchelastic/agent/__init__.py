"""Agent process: one per node, it starts, watches and stops the workers of the node.

guard              from a config to an exit code; the process around the agent
node_loop          the loop: next event, decide (lifecycle/), perform
agent              a node whose workers are child processes: what it consists of
failure_report     the sentences about failures and recoveries
preflight          the `--preflight` check
lifecycle/         decides what the node does; workers/: starts, watches and stops its workers
spawn/             the zygote and other ways to start processes; output/: logs and terminal
watch/             hangs and timers; telemetry/: events, progress and metrics
server/            import paths of release 0.2
"""
