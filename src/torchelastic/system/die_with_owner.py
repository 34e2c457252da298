"""`python die_with_owner.py OWNER PROGRAM ARGS…`: become a program that dies with its owner.

It is run as a file and imports nothing of torchelastic, so that it starts quickly. The owner is
the thread that started it, which the kernel looks at: whatever ends that, SIGKILL included, ends
the program.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    owner, *command = sys.argv[1:]
    if ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        sys.exit("prctl(PR_SET_PDEATHSIG) failed: the kernel cannot tie this process to its parent")
    # Died before the call: the signal would never come.
    if os.getppid() == int(owner):
        os.execv(command[0], command)


if __name__ == "__main__":
    main()
