"""Child processes that never outlive us.

Promise: when this process ends, however it ends, so do they (``launcher`` says how). They run in
sessions of their own, so that Ctrl-C reaches us alone and we stop them in order.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ledgers.errors import UnavailableError

POLL_S = 0.02
LAUNCHER = Path(__file__).with_name("launcher.py")

COMPLAINT = re.compile(r" (ERROR|FATAL) |^Caused by: |^Exception in |^Error[: ]")
"""In a line of a Java program's log; the stack traces in between help nobody at first."""
TAIL_LINES = 15

# Linux sends the parent's death signal when the *thread* that forked ends. A caller's thread may be
# short-lived, so all children are born on one thread that lives as long as the process does.
_SPAWNER = ThreadPoolExecutor(max_workers=1, thread_name_prefix="local-spawner")


class Child:
    """One child process. What it prints goes to the end of ``log``."""

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
        """Ask it to end (SIGTERM); it may take its time, so ``wait`` for it."""
        self.resume()  # a paused process would not see it
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it now (SIGKILL)."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._release()

    def wait(self, *, timeout_s: float) -> bool:
        """Whether it ended in time."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        self._release()
        return True

    def pause(self) -> None:
        """Freeze it (SIGSTOP): its connections stay open and nothing answers on them."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def log_tail(self) -> str:
        """The last complaints that it printed since it was started; without any, the last lines."""
        with self.log.open("rb") as log:
            log.seek(self._log_start)
            lines = log.read().decode(errors="replace").splitlines()
        complaints = [line for line in lines if COMPLAINT.search(line)]
        return "\n".join((complaints or lines)[-TAIL_LINES:])

    def _signal(self, number: int) -> None:
        if self.is_running:  # polled just now and not reaped elsewhere: the id is still its own
            self._process.send_signal(number)

    def _release(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()


def stop_all(children: Sequence[Child], *, timeout_s: float) -> None:
    """Ask all to end, side by side, and kill those that have not after the time-out."""
    for child in children:
        child.terminate()
    for child in children:
        if not child.wait(timeout_s=timeout_s):
            child.kill()


def wait_until(
    is_ready: Callable[[], bool], children: Collection[Child], *, timeout_s: float
) -> None:
    """Raises UnavailableError when one of the children ends instead, or it takes too long."""
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
        time.sleep(POLL_S)  # the condition lies in other processes: nothing here to wait on


def rss_bytes(pid: int) -> int | None:
    """Resident memory of a process; None where that cannot be told."""
    try:
        resident_pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return _rss_bytes_from_ps(pid)
    return resident_pages * os.sysconf("SC_PAGE_SIZE")


def _rss_bytes_from_ps(pid: int) -> int | None:
    """Where there is no /proc (macOS)."""
    try:
        found = subprocess.run(
            ["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, text=True, check=False
        )
    except OSError:
        return None
    return int(found.stdout) * 1024 if found.stdout.strip().isdigit() else None
