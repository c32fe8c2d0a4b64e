"""What was measured, a JSON line each."""

from collections.abc import Hashable, Sequence
from statistics import median

import msgspec


class Loss(msgspec.Struct, frozen=True, kw_only=True, tag="loss"):
    """A bookie was lost, its ledgers were marked. Times in s, from the end of its znode, by
    ZooKeeper's clock.

    Both are None where it took longer than the bench waits. ``repeat`` counts from 1.
    """

    size: int
    contender: str
    repeat: int
    ledger_count: int
    """That name the bookie."""
    first_mark_s: float | None
    all_marked_s: float | None
    packets: int
    """That ZooKeeper received meanwhile, but for the bench's own."""
    cpu_s: float
    zookeeper_cpu_s: float
    rss_bytes: int
    """Before the loss, with all ledgers known."""
    rss_bytes_max: int
    """Since the daemon was started."""
    ledgers_per_s: float | None
    """Read when it began to lead, where it says so."""

    @property
    def key(self) -> Hashable:
        return "loss", self.size, self.contender, self.repeat


class Idle(msgspec.Struct, frozen=True, kw_only=True, tag="idle"):
    """A node that leads while nothing happens, for ``duration_s``."""

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
    """What our ledger map of so many ledgers weighs, alone in a process."""

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
    """Of the losses, ascending."""
    return sorted({each.size for each in records if isinstance(each, Loss)})


def median_first_s(losses: Sequence[Loss]) -> float | None:
    return _median([each.first_mark_s for each in losses])


def median_all_s(losses: Sequence[Loss]) -> float | None:
    return _median([each.all_marked_s for each in losses])


def rss_per_ledger(records: Sequence[Record], size: int, contender: str) -> float | None:
    """What the daemon grew by since the smallest size; None where that is all there is."""
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
    """None where nothing was measured, or one of them did not end."""
    known = [each for each in times_s if each is not None]
    return median(known) if known and len(known) == len(times_s) else None
