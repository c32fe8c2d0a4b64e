"""The CPU of each process during a run on Spark, and the number of cores that it had."""

import os
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from bench.usage import cpu_of


def spark_cpu() -> Mapping[str, float]:
    """Return the CPU seconds, user and system, that the parts of Spark have used so far.

    ``driver_s``: this process, which lists, plans, and writes the results. ``jvm_s``: the children
    of this process, which are JVMs: Spark's driver and executor, with compilation and garbage
    collection. ``workers_s``: their descendants, the Python processes that inspect ledgers.
    """
    children = _children()
    jvms = children.get(os.getpid(), [])
    parts = {"driver_s": [os.getpid()], "jvm_s": jvms, "workers_s": _below(jvms, children)}
    return {part: cpu_of(pids) for part, pids in parts.items()}


@contextmanager
def on_cores(core_count: int, servers: Collection[int]) -> Iterator[None]:
    """Restrict this process, the servers and all processes started here to this number of cores.

    Processes started here stay restricted; the others only during the body.
    """
    pids = [os.getpid(), *servers]
    all_cores = os.sched_getaffinity(0)
    _confine(pids, sorted(all_cores)[:core_count])
    try:
        yield
    finally:
        _confine(pids, all_cores)


def _confine(pids: Collection[int], cores: Collection[int]) -> None:
    """Restrict every thread of the processes, because each thread has its own set of cores."""
    for pid in pids:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(ProcessLookupError):  # the process has ended
                os.sched_setaffinity(int(thread.name), cores)


def _children() -> Mapping[int, list[int]]:
    """Return the child processes of every process."""
    children: dict[int, list[int]] = defaultdict(list)
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parent = stat.read_text().rpartition(")")[2].split()[1]
            children[int(parent)].append(int(stat.parent.name))
    return children


def _below(pids: Sequence[int], children: Mapping[int, list[int]]) -> list[int]:
    """Return all descendants of these processes, without the processes themselves."""
    found: list[int] = []
    left = list(pids)
    while left:
        born = children.get(left.pop(), [])
        found += born
        left += born
    return found
