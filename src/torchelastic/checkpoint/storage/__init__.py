"""Worker process: checkpoint storage, and the files of a checkpoint.

storage           the interface, and local directories
fsspec_storage    any URL that fsspec supports
dcp_files         files of torch.distributed.checkpoint
safe_pickle       unpickles without running code
"""
