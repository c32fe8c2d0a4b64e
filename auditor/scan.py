"""Reading every ledger's metadata, many at a time, to find those that a loss touches.

One unreadable ledger stops nothing: it is reported by id and counted, and the rest goes on. A walk
that breaks off is a failure of the whole scan, never a shorter result (rule S8).
"""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import structlog

from auditor.endangered import Endangered, endangered
from ledgers.errors import CorruptionError, NoNodeError, NoSuchLedgerError
from ledgers.formats.named_bookies import may_name
from ledgers.manager import LedgerManager
from ledgers.metadata import BookieId
from ledgers.store import MetadataStore, Stat

log = structlog.get_logger()

READS_AT_ONCE = 500
UNREADABLE_LOGGED_MAX = 20
"""Ledgers named in the log by one scan; the count names the rest."""


@dataclass(slots=True)
class Scan:
    """What a scan found. ``absent_members``: named by some ledger, and not available."""

    ledger_count: int = 0
    unreadable: list[int] = field(default_factory=list)
    endangered: list[Endangered] = field(default_factory=list)
    absent_members: set[BookieId] = field(default_factory=set)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebirth:
    """A bookie was set up: its cookie's ``czxid``, and whether it was known under another one before."""

    czxid: int
    was_known: bool

    def is_after(self, ledger: Stat) -> bool:
        """Whether the bookie, if the ledger names it, may have lost its copies.

        A later write of the metadata proves nothing of one that was known: a writer may have changed
        another ensemble since. One that is new to us is more likely to have come in by such a write.
        """
        return self.czxid > (ledger.czxid if self.was_known else ledger.mzxid)


async def scan_ledgers(
    manager: LedgerManager,
    *,
    lost: Collection[BookieId],
    available: Collection[BookieId],
    reborn: Mapping[BookieId, "Rebirth"] = MappingProxyType({}),
) -> Scan:
    """``reborn``: bookies that were set up anew. Raises UnavailableError when the walk cannot be completed."""
    scan = Scan()
    async for ledger_ids in manager.ledger_ids():
        for start in range(0, len(ledger_ids), READS_AT_ONCE):
            part = ledger_ids[start : start + READS_AT_ONCE]
            await _scan_part(manager, part, scan, lost, available, reborn)
    if scan.unreadable:
        log.error(
            "scan.unreadable_ledgers",
            count=len(scan.unreadable),
            ledger_ids=scan.unreadable[:UNREADABLE_LOGGED_MAX],
            next_step="bookmender ledger show ID says what is wrong with one",
        )
    return scan


async def may_be_named(
    store: MetadataStore,
    manager: LedgerManager,
    unreadable: Sequence[int],
    bookies: Collection[BookieId],
) -> dict[BookieId, list[int]]:
    """Which of these ledgers may name which of the bookies, though their metadata cannot be read.

    All of them, but for those whose bytes prove that they name others only (``may_name``). A ledger that
    is gone names nobody. Raises UnavailableError when that cannot be told.
    """

    async def data(ledger_id: int) -> bytes | None:
        try:
            return (await store.get(manager.path(ledger_id)))[0]
        except NoNodeError:
            return None

    found: dict[BookieId, list[int]] = {}
    for start in range(0, len(unreadable), READS_AT_ONCE):
        part = unreadable[start : start + READS_AT_ONCE]
        for ledger_id, held in zip(part, await asyncio.gather(*map(data, part)), strict=True):
            for bookie in bookies:
                if held is not None and may_name(held, bookie):
                    found.setdefault(bookie, []).append(ledger_id)
    return found


async def _scan_part(
    manager: LedgerManager,
    ledger_ids: Sequence[int],
    scan: Scan,
    lost: Collection[BookieId],
    available: Collection[BookieId],
    reborn: Mapping[BookieId, "Rebirth"],
) -> None:
    results = await asyncio.gather(
        *(manager.read(ledger_id) for ledger_id in ledger_ids), return_exceptions=True
    )
    for ledger_id, result in zip(ledger_ids, results, strict=True):
        match result:
            case NoSuchLedgerError():  # deleted since it was listed
                continue
            case CorruptionError():
                scan.unreadable.append(ledger_id)
            case BaseException():
                raise result
            case _:
                scan.absent_members.update(result.metadata.bookies.difference(available))
                emptied = (b for b, birth in reborn.items() if birth.is_after(result.stat))
                if found := endangered(ledger_id, result.metadata, {*lost, *emptied}):
                    scan.endangered.append(found)
        scan.ledger_count += 1
