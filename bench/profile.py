"""The CPU time of a daemon by activity, from the samples of ``bench.sampled``."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from bench.sampled import Sample

REPOSITORY = Path(__file__).parents[1]

GROUPS: Mapping[str, str] = {
    "ledgers/bulk/": "bulk path",
    "ledgers/digest.py": "bulk path",
    "ledgers/wire/": "bookie client",
    "ledgers/client.py": "bookie client",
    "ledgers/connection.py": "bookie client",
    "ledgers/zookeeper/": "ZooKeeper client",
    "kazoo/": "ZooKeeper client",
    "ledgers/codec/": "metadata codec",
    "ledgers/model.py": "metadata codec",
    "google/protobuf/": "metadata codec",
    "auditor/": "auditor",
    "replication/work_queue.py": "queue",
    "replication/marks.py": "queue",
    "replication/transactions.py": "queue",
    "replication/worker.py": "queue",
    "replication/": "planning, checks",
    "ledgers/": "planning, checks",
    "structlog/": "logs, metrics",
    "logging/": "logs, metrics",
    "prometheus_client/": "logs, metrics",
    "asyncio/selector_events.py": "sockets",
    "asyncio/": "tasks, event loop",
    "selectors.py": "tasks, event loop",
    "daemon/": "the rest",
}
"""Groups by the beginning of a path. The first match decides."""
REST = "the rest"
WAITING = ("select", "wait")
"""Innermost functions in which threads wait.

A thread that is found there has used its CPU since the last sample somewhere else, at an unknown
place. Such samples are left out, together with the CPU of waiting itself.
"""


def load_samples(path: Path, *, begin_s: float, end_s: float) -> list[Sample]:
    """Return the samples between two monotonic times, without those of waiting threads."""
    samples = msgspec.json.decode(path.read_bytes(), type=list[Sample])
    return [
        sample
        for sample in samples
        if begin_s <= sample.at_s <= end_s and not sample.stack[0].endswith(WAITING)
    ]


def by_group(samples: Iterable[Sample]) -> Mapping[str, float]:
    """Return CPU seconds by group.

    The innermost frame that belongs to a group decides. So the CPU of a standard library module
    counts for its caller, except that of the event loop itself.
    """
    spent: dict[str, float] = defaultdict(float)
    for sample in samples:
        groups = (group for name in sample.stack if (group := group_of(name)) is not None)
        spent[next(groups, REST)] += sample.cpu_s
    return spent


def by_function(samples: Iterable[Sample]) -> Mapping[str, float]:
    """Return CPU seconds by the innermost function."""
    spent: dict[str, float] = defaultdict(float)
    for sample in samples:
        spent[_short(sample.stack[0])] += sample.cpu_s
    return spent


def group_of(name: str) -> str | None:
    short = _short(name)
    return next((group for start, group in GROUPS.items() if short.startswith(start)), None)


def _short(name: str) -> str:
    """Return the path from the package on, without the place where it is installed."""
    name = name.removeprefix(f"{REPOSITORY}/")
    _, _, installed = name.rpartition("/site-packages/")
    _, _, standard = installed.rpartition("/lib/python")
    return standard.partition("/")[2] if standard != installed else installed
