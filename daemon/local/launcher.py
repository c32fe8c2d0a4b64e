"""Becomes another program that dies with the process that started it, even after kill -9.

Run as ``python -I -S launcher.py PARENT_PID COMMAND...``. Its stdin is the read end of a pipe; the
parent holds the write end. The module imports nothing of this project, because it is executed, not
imported.

On Linux the kernel sends the signal (PR_SET_PDEATHSIG). On other systems a forked watcher, which is
a small process, waits until the pipe breaks. In both cases the program keeps the process id of the
launcher.
"""

import ctypes
import os
import select
import signal
import sys

PR_SET_PDEATHSIG = 1
CHECK_S = 1.0
"""Interval at which a watcher checks whether its program has ended."""


def main() -> None:
    parent_pid, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ask_kernel_for_death(parent_pid)
    elif os.fork() == 0:
        watch(program_pid=os.getppid())
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.execvp(command[0], command)


def ask_kernel_for_death(parent_pid: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:  # the parent died before the request
        sys.exit(1)


def watch(program_pid: int) -> None:
    """Kill the program when the pipe breaks; exit when the program has ended by itself."""
    while os.getppid() == program_pid:
        readable, _, _ = select.select([0], [], [], CHECK_S)
        if readable:  # nothing is ever written: this is the end of the pipe
            os.kill(program_pid, signal.SIGKILL)
            break
    os._exit(0)


if __name__ == "__main__":
    main()
