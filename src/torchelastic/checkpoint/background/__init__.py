"""Worker process: checkpoints written in the background, by a thread or a process.

saving            saves and loads with the manager of this process, for the training loop
runner            the thread that writes, one checkpoint at a time
save_job          one rank's part of a checkpoint, as data, and how it is written
writer_process    the process that writes, so that the training process does not have to
staging           the memory that a state is copied to at a step boundary
take_fence        takes the fence of the storage for a world
"""
