"""Child processes that end with this process.

When this process ends, for any reason, its children end (see ``launcher``). They run in sessions of
their own, so Ctrl-C reaches only this process, which then stops them in order.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from ledgers.errors import UnavailableError

POLL_S = 0.02
LAUNCHER = Path(__file__).with_name("launcher.py")

COMPLAINT = re.compile(r" (ERROR|FATAL) |^Caused by: |^Exception in |^Error[: ]")
"""Matches the complaints in the log of a Java program. The stack traces between them are
skipped."""
TAIL_LINES = 15

# Linux sends the parent's death signal when the *thread* that forked ends. The thread of a caller
# may be short-lived, so all children are forked on one thread that lives as long as the process.
_SPAWNER = ThreadPoolExecutor(max_workers=1, thread_name_prefix="local-spawner")


class Child:
    """One child process. Its output is appended to ``log``."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        log: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name, self.log = name, log
        log.parent.mkdir(parents=True, exist_ok=True)
        launch = [sys.executable, "-I", "-S", str(LAUNCHER), str(os.getpid()), *command]
        with log.open("ab") as output:
            self._log_start = output.tell()
            self._process = _SPAWNER.submit(
                subprocess.Popen[bytes],
                launch,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=environment,
            ).result()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Also true while paused."""
        return self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()

    def terminate(self) -> None:
        """Send SIGTERM. The process may take some time to end; call ``wait`` afterwards."""
        self.resume()  # a paused process would not receive it
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._release()

    def wait(self, *, timeout_s: float) -> bool:
        """Wait for the end of the process. Return True if it ended in time."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        self._release()
        return True

    def pause(self) -> None:
        """Freeze the process (SIGSTOP): its connections stay open, and nothing answers on them."""
        self._signal(signal.SIGSTOP)
        # A thread that runs meanwhile may still answer.
        with suppress(ChildProcessError):  # the child of another process
            os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def log_tail(self) -> str:
        """Return the last complaints that the process logged since its start; if there are none,
        the last lines."""
        with self.log.open("rb") as log:
            log.seek(self._log_start)
            lines = log.read().decode(errors="replace").splitlines()
        complaints = [line for line in lines if COMPLAINT.search(line)]
        return "\n".join((complaints or lines)[-TAIL_LINES:])

    def _signal(self, number: int) -> None:
        if self.is_running:  # polled just before and reaped nowhere else: the id is still its own
            self._process.send_signal(number)

    def _release(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()


def stop_all(children: Sequence[Child], *, timeout_s: float) -> None:
    """Send SIGTERM to all at once, and kill those that have not ended after the timeout."""
    for child in children:
        child.terminate()
    for child in children:
        if not child.wait(timeout_s=timeout_s):
            child.kill()


def wait_until(
    is_ready: Callable[[], bool], children: Collection[Child], *, timeout_s: float
) -> None:
    """Wait until the condition is true. Raises UnavailableError if a child ends or the time is
    over."""
    deadline_s = time.monotonic() + timeout_s
    while not is_ready():
        for child in children:
            if not child.is_running:
                raise UnavailableError(
                    f"{child.name} ended with code {child.exit_code}; "
                    f"the end of {child.log}:\n{child.log_tail()}"
                )
        if time.monotonic() > deadline_s:
            ends = (f"; the end of {child.log}:\n{child.log_tail()}" for child in children)
            raise UnavailableError(f"not ready after {timeout_s:.0f} s{''.join(ends)}")
        time.sleep(POLL_S)  # the condition is about other processes, so nothing here can be awaited


def rss_bytes(pid: int) -> int | None:
    """Return the resident memory of a process; None if it is unknown, as on systems without
    /proc."""
    try:
        resident_pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return resident_pages * os.sysconf("SC_PAGE_SIZE")
