"""Processes: children that end with this process or outlive it, and those of an earlier command.

When this process ends, for any reason, its bound children end (see ``launcher``). All run in
sessions of their own, so Ctrl-C reaches only this process, which then stops them in order.
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
from typing import Any

from ledgers.errors import UnavailableError

POLL_S = 0.02
KILL_TIMEOUT_S = 30.0
PROC = Path("/proc")
LAUNCHER = Path(__file__).with_name("launcher.py")

COMPLAINT = re.compile(r" (ERROR|FATAL) |^Caused by: |^Exception in |^Error[: ]")
"""Matches the complaints in the log of a Java program. The stack traces between them are
skipped."""
TAIL_LINES = 15

# Linux sends the parent's death signal when the *thread* that forked ends. The thread of a caller
# may be short-lived, so all children are forked on one thread that lives as long as the process.
_SPAWNER = ThreadPoolExecutor(max_workers=1, thread_name_prefix="local-spawner")


class Child:
    """One child process. Its output is appended to ``log``. ``is_bound``: it ends with this
    process. ``keeps``: a file descriptor that it inherits."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        log: Path,
        environment: Mapping[str, str] | None = None,
        is_bound: bool = True,
        keeps: int | None = None,
    ) -> None:
        self.name, self.log, self.was_killed = name, log, False
        log.parent.mkdir(parents=True, exist_ok=True)
        launcher = [sys.executable, "-I", "-S", str(LAUNCHER), str(os.getpid())]
        with log.open("ab") as output:
            self._log_start = output.tell()
            self._process = _SPAWNER.submit(
                _spawn,
                [*(launcher if is_bound else ()), *command],
                stdin=subprocess.PIPE if is_bound else subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=() if keeps is None else (keeps,),
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
        """Send SIGKILL, and wait for the end."""
        self.was_killed = True
        self._signal(signal.SIGKILL)
        self.wait(timeout_s=KILL_TIMEOUT_S)

    def wait(self, *, timeout_s: float) -> bool:
        """Wait for the end of the process. Return True if it ended in time."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        if self._process.stdin is not None:
            self._process.stdin.close()
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
            os.kill(self.pid, number)


class Found(Child):
    """A process that an earlier command started. ``mark``: an argument that no other process has;
    it tells this process from a later one with the same id."""

    def __init__(self, name: str, pid: int, mark: str, *, log: Path) -> None:
        self.name, self.log, self.was_killed = name, log, False
        self._pid, self._mark, self._log_start = pid, mark, 0

    @property
    def pid(self) -> int:
        return self._pid

    @property
    def is_running(self) -> bool:
        return bool(find(self._mark, pid=self._pid))

    @property
    def exit_code(self) -> int | None:
        return None

    def wait(self, *, timeout_s: float) -> bool:
        deadline_s = time.monotonic() + timeout_s
        while self.is_running:
            if time.monotonic() > deadline_s:
                return False
            time.sleep(POLL_S)  # it is no child, so its end cannot be awaited
        return True


def _spawn(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a process that ``find`` finds at once: Popen returns a moment before the process has
    its arguments."""
    process = subprocess.Popen[bytes](command, **options)
    arguments = PROC / f"{process.pid}" / "cmdline"
    while arguments.exists() and process.poll() is None and not arguments.read_bytes():
        time.sleep(POLL_S)
    return process


def await_spawns() -> None:
    """Return when no process is being started."""
    _SPAWNER.submit(int).result()


def find(mark: str, *, pid: int | None = None) -> int | None:
    """Return the id of the process with this argument, or None. A zombie has no arguments. ``pid``:
    looks only at this process."""
    commands = dict[int, str]()
    if PROC.is_dir():  # Linux, also where ps is not installed
        for folder in PROC.iterdir() if pid is None else [PROC / f"{pid}"]:
            with suppress(OSError, ValueError):  # it has ended, or is no process
                commands[int(folder.name)] = (folder / "cmdline").read_text(errors="replace")
    else:
        command = ["ps", "-ww", "-o", "pid=,args=", *(["-ax"] if pid is None else ["-p", f"{pid}"])]
        listed = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        for line in listed.splitlines():
            number, _, arguments = line.strip().partition(" ")
            commands[int(number)] = f"{arguments}\0"
    wanted = re.compile(rf"{re.escape(mark)}[ \0]")
    return next((pid for pid, arguments in commands.items() if wanted.search(arguments)), None)


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
