"""Reading every ledger's metadata, many at a time, to find those that a loss touches: for a
command, which looks once. The leader has its index.

One unreadable ledger stops nothing: it is reported by id and counted, and the rest goes on. A walk
that breaks off is a failure of the whole scan, never a shorter result (rule S8).
"""

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import structlog

from auditor.ledger_map import MappedLedger
from auditor.underreplication import UnderreplicatedLedger, underreplicated
from ledgers.codec.metadata import may_name
from ledgers.errors import CorruptionError, NoNodeError, NoSuchLedgerError, UnauthorizedError
from ledgers.manager import LedgerManager
from ledgers.model import BookieId
from ledgers.store import MetadataStore
from ledgers.tasks import gather_in_parts

log = structlog.get_logger()

READS_AT_ONCE = 500
UNREADABLE_LOGGED_MAX = 20
"""Ledgers named in the log by one scan; the count tells of the rest."""


@dataclass(slots=True)
class Scan:
    """What a scan found. ``underreplicated``: in the order of their ids, as far as they were listed
    so."""

    ledger_count: int = 0
    unreadable: list[int] = field(default_factory=list)
    underreplicated: list[UnderreplicatedLedger] = field(default_factory=list)


async def scan_ledgers(manager: LedgerManager, *, lost: Collection[BookieId]) -> Scan:
    """Raises UnavailableError when the walk cannot be completed."""
    scan = Scan()
    async for ledger_ids in manager.ledger_ids():
        for start in range(0, len(ledger_ids), READS_AT_ONCE):
            part = ledger_ids[start : start + READS_AT_ONCE]
            ledgers, unreadable = await read_indexed(manager, part)
            scan.ledger_count += len(ledgers) + len(unreadable)
            scan.unreadable += unreadable
            scan.underreplicated += filter(None, (underreplicated(each, lost) for each in ledgers))
    if scan.unreadable:
        log.error(
            "scan.unreadable_ledgers",
            count=len(scan.unreadable),
            ledger_ids=scan.unreadable[:UNREADABLE_LOGGED_MAX],
        )
    return scan


async def may_be_named(
    store: MetadataStore,
    manager: LedgerManager,
    unreadable: Sequence[int],
    bookies: Collection[BookieId],
) -> dict[BookieId, list[int]]:
    """Which of these ledgers may name which of the bookies, though their metadata cannot be read.

    All of them, but for those whose bytes prove that they name others only (``may_name``). A ledger
    that is gone names nobody; one that may not be read, anybody. Raises UnavailableError when that
    cannot be told.
    """

    async def named_in(ledger_id: int) -> Collection[BookieId]:
        try:
            data, _ = await store.get(manager.path(ledger_id))
        except NoNodeError:
            return ()
        except UnauthorizedError:
            return bookies
        return [bookie for bookie in bookies if may_name(data, bookie)]

    found: dict[BookieId, list[int]] = {}
    named = await gather_in_parts(named_in, unreadable, at_once=READS_AT_ONCE)
    for ledger_id, among in zip(unreadable, named, strict=True):
        for bookie in among:
            found.setdefault(bookie, []).append(ledger_id)
    return found


async def read_indexed(
    manager: LedgerManager, ledger_ids: Sequence[int]
) -> tuple[list[MappedLedger], list[int]]:
    """The ledgers, and which of them cannot be read; those that were deleted are in neither. Raises
    UnavailableError."""
    results = await asyncio.gather(
        *(manager.read(ledger_id) for ledger_id in ledger_ids), return_exceptions=True
    )
    ledgers: list[MappedLedger] = []
    unreadable: list[int] = []
    for ledger_id, result in zip(ledger_ids, results, strict=True):
        match result:
            case NoSuchLedgerError():  # deleted since it was listed
                continue
            case CorruptionError() | UnauthorizedError():
                unreadable.append(ledger_id)
            case BaseException():
                raise result
            case _:
                ledgers.append(MappedLedger.of(ledger_id, result.metadata, result.stat))
    return ledgers, unreadable
