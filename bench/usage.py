"""The resources that processes and the machine have used, from Linux's /proc."""

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_RSS_MAX_RESET = "5"


def cpu_of(pids: Iterable[int | None]) -> float:
    """Return the CPU seconds, user and system, of these processes together, to 10 ms. A process
    that has ended counts as 0."""
    ticks = 0
    for pid in pids:
        with suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks * _TICK_S


def cpu_of_machine() -> float:
    """Return the CPU seconds of all cores, with nice and interrupts, without idle time and disk
    waits."""
    ticks = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    user, nice, system, _, _, interrupts, soft_interrupts = ticks[:7]
    return (user + nice + system + interrupts + soft_interrupts) * _TICK_S


def written_bytes(pid: int) -> int:
    """Return the bytes that the process wrote to files and sockets with system calls."""
    for line in Path(f"/proc/{pid}/io").read_text().splitlines():
        if line.startswith("wchar:"):
            return int(line.split()[1])
    raise LookupError(f"/proc/{pid}/io does not say what was written")


def rss_bytes(pid: int) -> int:
    """Return the current resident memory."""
    return _status_bytes(pid, "VmRSS")


def rss_bytes_max(pid: int) -> int:
    """Return the highest resident memory since ``forget_rss_max``."""
    return _status_bytes(pid, "VmHWM")


def _status_bytes(pid: int, name: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0


def forget_rss_max(pid: int) -> None:
    """Restart the measurement of ``rss_bytes_max``. If the kernel refuses, it covers the whole life
    of the process."""
    with suppress(OSError):
        Path(f"/proc/{pid}/clear_refs").write_text(_RSS_MAX_RESET)
