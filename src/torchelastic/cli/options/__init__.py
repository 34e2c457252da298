"""Command line: the flags, their parser, checks and help.

command_table     every command with its flags; command: the record of one
flags             every flag of `run`, declared once; flag: the record of one
compat_flags      flags for command lines of torchrun, torch.distributed.launch and Bagua
parser            argv and environment to typed values; values: converters of single values
help              the text of `--help`; completion: shell completion scripts
launch_config     parsed flags to `LaunchConfig` and `Entry`
platform_values   values from the platform, for flags that were not given
rendezvous_rules  where and how the nodes meet; shape: how many nodes and workers
checks            checks of files, modules and directories before anything starts
"""
