"""What processes have used up, and the machine with them, as Linux's /proc tells."""

import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_RSS_MAX_RESET = "5"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cpu:
    """CPU time in seconds; of the machine, ``user_s`` and ``system_s`` of all cores together."""

    user_s: float
    system_s: float

    @property
    def total_s(self) -> float:
        return self.user_s + self.system_s

    def __sub__(self, earlier: "Cpu") -> "Cpu":
        return Cpu(user_s=self.user_s - earlier.user_s, system_s=self.system_s - earlier.system_s)


def cpu_of(pids: Iterable[int | None]) -> Cpu:
    """Of these processes together, to 10 ms; one that has ended counts nothing."""
    user_s = system_s = 0.0
    for pid in pids:
        with suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            user_s += int(fields[11]) * _TICK_S
            system_s += int(fields[12]) * _TICK_S
    return Cpu(user_s=user_s, system_s=system_s)


def cpu_of_machine() -> Cpu:
    """User, with nice, and system, with interrupts; neither idle time nor waiting for the disk."""
    ticks = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    user, nice, system, _, _, interrupts, soft_interrupts = ticks[:7]
    return Cpu(
        user_s=(user + nice) * _TICK_S,
        system_s=(system + interrupts + soft_interrupts) * _TICK_S,
    )


def written_bytes(pid: int) -> int:
    """To files and sockets, by system calls."""
    for line in Path(f"/proc/{pid}/io").read_text().splitlines():
        if line.startswith("wchar:"):
            return int(line.split()[1])
    raise LookupError(f"/proc/{pid}/io does not say what was written")


def rss_bytes(pid: int) -> int:
    """Now."""
    return _status_bytes(pid, "VmRSS")


def rss_bytes_max(pid: int) -> int:
    """The highest since ``forget_rss_max``."""
    return _status_bytes(pid, "VmHWM")


def _status_bytes(pid: int, name: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0


def forget_rss_max(pid: int) -> None:
    """Let ``rss_bytes_max`` count from now on; where the kernel refuses, it counts from the
    start."""
    with suppress(OSError):
        Path(f"/proc/{pid}/clear_refs").write_text(_RSS_MAX_RESET)
