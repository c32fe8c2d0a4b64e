"""Who used the CPU while a run on Spark was under way, and how many cores there were for it."""

import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from bench.usage import cpu_of

LOOP_S = 1.0
_LOOP = """
import os, sys, time
os.sched_setaffinity(0, {int(sys.argv[2])})
rounds, end_s = 0, time.monotonic() + float(sys.argv[1])
while time.monotonic() < end_s:
    sum(range(10_000))
    rounds += 1
print(rounds)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SparkCpu:
    """CPU seconds, user and system, that Spark's parties have used so far."""

    driver_s: float
    """This process: it lists, plans, and writes the results."""
    jvm_s: float
    """Spark's driver and executor, which are one where it runs locally; compiling and collecting
    counted in."""
    workers_s: float
    """The executor's Python, where ledgers are looked at."""

    @classmethod
    def now(cls) -> "SparkCpu":
        """This process's children being JVMs of Spark's, and theirs Python."""
        children = _children()
        jvms = children.get(os.getpid(), [])
        return cls(
            driver_s=cpu_of([os.getpid()]).total_s,
            jvm_s=cpu_of(jvms).total_s,
            workers_s=cpu_of(_below(jvms, children)).total_s,
        )

    @property
    def total_s(self) -> float:
        return self.driver_s + self.jvm_s + self.workers_s

    def __sub__(self, earlier: "SparkCpu") -> "SparkCpu":
        return SparkCpu(
            driver_s=self.driver_s - earlier.driver_s,
            jvm_s=self.jvm_s - earlier.jvm_s,
            workers_s=self.workers_s - earlier.workers_s,
        )


@contextmanager
def on_cores(core_count: int, servers: Collection[int]) -> Iterator[None]:
    """This process, the servers, and what is started here meanwhile, have so many cores between
    them.

    What is started here keeps to them for good, the others only so long.
    """
    pids = [os.getpid(), *servers]
    all_cores = os.sched_getaffinity(0)
    _confine(pids, sorted(all_cores)[:core_count])
    try:
        yield
    finally:
        _confine(pids, all_cores)


def scaling_of_cores() -> float:
    """How much more of a loop that shares nothing gets done now on the first two cores than on the
    first alone.

    Two, were it not for what else uses the machine that these are cores of.
    """
    cores = sorted(os.sched_getaffinity(0))[:2]
    return _rounds(cores) / _rounds(cores[:1])


def _rounds(cores: Sequence[int]) -> int:
    """Of all of them together, at the same time."""
    command = [sys.executable, "-c", _LOOP, str(LOOP_S)]
    loops = [
        subprocess.Popen([*command, str(core)], stdout=subprocess.PIPE, text=True) for core in cores
    ]
    return sum(int(loop.communicate()[0]) for loop in loops)


def _confine(pids: Collection[int], cores: Collection[int]) -> None:
    """Every thread of them: each has cores of its own."""
    for pid in pids:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(ProcessLookupError):  # it has ended
                os.sched_setaffinity(int(thread.name), cores)


def _children() -> Mapping[int, list[int]]:
    """Of every process."""
    children: dict[int, list[int]] = defaultdict(list)
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parent = stat.read_text().rpartition(")")[2].split()[1]
            children[int(parent)].append(int(stat.parent.name))
    return children


def _below(pids: Sequence[int], children: Mapping[int, list[int]]) -> list[int]:
    """All that descend from them, they themselves not."""
    found: list[int] = []
    left = list(pids)
    while left:
        born = children.get(left.pop(), [])
        found += born
        left += born
    return found
