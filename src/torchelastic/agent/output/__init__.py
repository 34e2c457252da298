"""Agent process: the output of workers and of the agent itself, in files and on the terminal.

log_files          torchrun's layout of log files; which streams go where; the prefix of shown lines
tee                a worker's stream on its way to its file and, line by line, to the terminal
output_stream      stdout and stderr of the agent, on which workers' lines are shown
console            the agent's own lines on stderr, and the countdown while a job waits
terminal_text      removes escape sequences from users' texts
"""
