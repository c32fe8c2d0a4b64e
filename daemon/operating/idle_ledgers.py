"""Open ledgers that nobody writes any more, as the last periodic check saw them."""

from dataclasses import dataclass
from functools import partial

from auditor.checks.idle_sightings import Sighting, read_sightings
from auditor.checks.kinds import IDLE_OPEN
from auditor.checks.records import read_check
from daemon.visit import Visit
from ledgers.clock import Clock
from ledgers.errors import CorruptionError, NoSuchLedgerError, UnauthorizedError
from ledgers.metadata import BookieId, LedgerState
from ledgers.operations.tasks import gather_in_parts

READS_AT_ONCE = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleLedger:
    """``idle_s``: at least so long. ``last_entry_id``: -1: it has none. ``bookies``: of its last
    segment."""

    ledger_id: int
    state: LedgerState
    idle_s: float
    last_entry_id: int
    bookies: tuple[BookieId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleLedgers:
    """The longest idle first. ``checked_ms``: when the check that tells of them was last over;
    None: never."""

    ledgers: tuple[IdleLedger, ...]
    checked_ms: int | None


async def find_idle(cluster: Visit, *, after_s: float, clock: Clock) -> IdleLedgers:
    """Those that have got no entry for so long, and whose metadata still is as it was."""
    now_ms = clock.wall_ms()
    sightings = await read_sightings(cluster.store, cluster.ur)
    idle = [(i, each) for i, each in sightings.items() if each.idle_s(now_ms) >= after_s]
    look = partial(_still_idle, cluster, now_ms=now_ms)
    looked = await gather_in_parts(look, idle, at_once=READS_AT_ONCE)
    record = await read_check(cluster.store, cluster.ur, IDLE_OPEN.name)
    return IdleLedgers(
        ledgers=tuple(each for each in looked if each is not None),
        checked_ms=None if record.last is None else record.last.finished_ms,
    )


async def _still_idle(
    cluster: Visit, sighted: tuple[int, Sighting], *, now_ms: int
) -> IdleLedger | None:
    """None where it was closed, written or deleted since it was seen, or cannot be read."""
    ledger_id, sighting = sighted
    try:
        found = await cluster.manager.read(ledger_id)
    except (NoSuchLedgerError, CorruptionError, UnauthorizedError):
        return None
    if found.metadata.is_closed or found.stat.mtime_ms > sighting.since_ms:
        return None
    return IdleLedger(
        ledger_id=ledger_id,
        state=found.metadata.state,
        idle_s=sighting.idle_s(now_ms),
        last_entry_id=sighting.last_entry_id,
        bookies=found.metadata.last_segment.ensemble,
    )
