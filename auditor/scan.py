"""Reads the metadata of all ledgers, for commands that need a single scan. The leader uses its
ledger map.

An unreadable ledger is reported and counted, and the scan continues. If the listing fails, the
whole scan fails; it never returns a part (rule S8).
"""

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import structlog

from auditor.ledger_map import MappedLedger
from auditor.underreplication import UnderreplicatedLedger, underreplicated
from ledgers.codec.metadata import may_name
from ledgers.errors import CorruptionError, NoNodeError, NoSuchLedgerError, UnauthorizedError
from ledgers.manager import LedgerManager, VersionedMetadata
from ledgers.model import BookieId
from ledgers.store import MetadataStore
from ledgers.tasks import gather_in_parts

log = structlog.get_logger()

READS_AT_ONCE = 500
UNREADABLE_LOGGED_MAX = 20
"""Ledgers named in the log of one scan. The rest is only counted."""


@dataclass(slots=True)
class Scan:
    """Result of a scan. ``underreplicated``: in the order of the listing."""

    ledger_count: int = 0
    unreadable: list[int] = field(default_factory=list)
    underreplicated: list[UnderreplicatedLedger] = field(default_factory=list)


async def scan_ledgers(manager: LedgerManager, *, lost: Collection[BookieId]) -> Scan:
    """Return which ledgers name the ``lost`` bookies. Raises UnavailableError if the listing
    fails."""
    scan = Scan()
    async for ledger_ids in manager.ledger_ids():
        for start in range(0, len(ledger_ids), READS_AT_ONCE):
            part = ledger_ids[start : start + READS_AT_ONCE]
            ledgers, unreadable = await read_mapped_ledgers(manager, part)
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
    """Return, by bookie, which of these unreadable ledgers may name it.

    Bytes that prove that a ledger names only other bookies are believed (``may_name``). A deleted
    ledger names no bookie; a ledger that ACLs deny access to may name any. Raises UnavailableError
    if a ledger cannot be read.
    """

    async def named_by(ledger_id: int) -> Collection[BookieId]:
        try:
            data, _ = await store.get(manager.path(ledger_id))
        except NoNodeError:
            return ()
        except UnauthorizedError:
            return bookies
        return [bookie for bookie in bookies if may_name(data, bookie)]

    found: dict[BookieId, list[int]] = {}
    named = await gather_in_parts(named_by, unreadable, at_once=READS_AT_ONCE)
    for ledger_id, among in zip(unreadable, named, strict=True):
        for bookie in among:
            found.setdefault(bookie, []).append(ledger_id)
    return found


async def read_mapped_ledgers(
    manager: LedgerManager, ledger_ids: Sequence[int]
) -> tuple[list[MappedLedger], list[int]]:
    """Read these ledgers. Return those that can be read, and the ids of those that cannot. Deleted
    ledgers are left out. Raises UnavailableError."""
    ledgers: list[MappedLedger] = []
    unreadable: list[int] = []
    for ledger_id, found in (await read_each(manager, ledger_ids)).items():
        if isinstance(found, VersionedMetadata):
            ledgers.append(MappedLedger.of(ledger_id, found.metadata, found.stat))
        else:
            unreadable.append(ledger_id)
    return ledgers, unreadable


async def read_each(
    manager: LedgerManager, ledger_ids: Sequence[int]
) -> dict[int, VersionedMetadata | CorruptionError | UnauthorizedError]:
    """Return the metadata of each ledger, or why it cannot be read, by ledger id. Deleted ledgers
    are left out. Raises UnavailableError."""
    results = await asyncio.gather(*map(manager.read, ledger_ids), return_exceptions=True)
    found: dict[int, VersionedMetadata | CorruptionError | UnauthorizedError] = {}
    for ledger_id, result in zip(ledger_ids, results, strict=True):
        match result:
            case NoSuchLedgerError():  # deleted since it was listed
                continue
            case VersionedMetadata() | CorruptionError() | UnauthorizedError():
                found[ledger_id] = result
            case _:
                raise result
    return found
