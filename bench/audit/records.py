"""The results, one JSON line per record."""

from collections.abc import Hashable, Sequence
from statistics import median

import msgspec


class Loss(msgspec.Struct, frozen=True, kw_only=True, tag="loss"):
    """The loss of a bookie. Times in s from the deletion of its znode, by ZooKeeper's clock.

    Both times are None after a timeout of the bench. ``repeat`` counts from 1.
    """

    size: int
    contender: str
    repeat: int
    ledger_count: int
    """Number of ledgers that name the bookie."""
    first_mark_s: float | None
    all_marked_s: float | None
    packets: int
    """Packets that ZooKeeper received meanwhile, without those of the bench."""
    cpu_s: float
    zookeeper_cpu_s: float
    rss_bytes: int
    """Before the loss, with all ledgers known."""
    rss_bytes_max: int
    """Maximum since the daemon was started."""
    ledgers_per_s: float | None
    """Read rate when it began to lead, if the daemon reports it."""

    @property
    def key(self) -> Hashable:
        return "loss", self.size, self.contender, self.repeat


class Idle(msgspec.Struct, frozen=True, kw_only=True, tag="idle"):
    """The cost of a node that leads for ``duration_s`` while nothing happens."""

    size: int
    contender: str
    duration_s: float
    cpu_s: float
    rss_bytes: int
    packets: int

    @property
    def key(self) -> Hashable:
        return "idle", self.size, self.contender

    @property
    def core_share(self) -> float:
        return self.cpu_s / self.duration_s


class Weight(msgspec.Struct, frozen=True, kw_only=True, tag="weight"):
    """The memory of our ledger map with this number of ledgers, alone in a process."""

    size: int
    ledger_map_bytes: int

    @property
    def key(self) -> Hashable:
        return "weight", self.size


Record = Loss | Idle | Weight


def losses_of(records: Sequence[Record], size: int, contender: str) -> list[Loss]:
    return [
        each
        for each in records
        if isinstance(each, Loss) and (each.size, each.contender) == (size, contender)
    ]


def idle_of(records: Sequence[Record], size: int, contender: str) -> Idle | None:
    for each in records:
        if isinstance(each, Idle) and (each.size, each.contender) == (size, contender):
            return each
    return None


def sizes_of(records: Sequence[Record]) -> list[int]:
    """Return the sizes of the losses, ascending."""
    return sorted({each.size for each in records if isinstance(each, Loss)})


def median_first_s(losses: Sequence[Loss]) -> float | None:
    return _median([each.first_mark_s for each in losses])


def median_all_s(losses: Sequence[Loss]) -> float | None:
    return _median([each.all_marked_s for each in losses])


def rss_per_ledger(records: Sequence[Record], size: int, contender: str) -> float | None:
    """Return the memory growth of the daemon per ledger since the smallest size; None for the
    smallest size itself."""
    smallest = min(sizes_of(records), default=size)
    few, many = (losses_of(records, each, contender) for each in (smallest, size))
    if size == smallest or not few or not many:
        return None
    grown = median(each.rss_bytes for each in many) - median(each.rss_bytes for each in few)
    return grown / (size - smallest)


def ledger_map_bytes_per_ledger(records: Sequence[Record], size: int) -> float | None:
    for each in records:
        if isinstance(each, Weight) and each.size == size:
            return each.ledger_map_bytes / size
    return None


def _median(times_s: Sequence[float | None]) -> float | None:
    """Return the median; None if nothing was measured, or if a measurement had a timeout."""
    known = [each for each in times_s if each is not None]
    return median(known) if known and len(known) == len(times_s) else None
