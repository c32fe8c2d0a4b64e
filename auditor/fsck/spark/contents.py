"""Reads a cluster for the data sources, as rows: dictionaries with the columns of ``schemas``.
Writes nothing, and fences no ledger.

Each function opens its own session and yields lists of rows. An incomplete listing raises (rule
S8).
"""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import google_crc32c

from auditor.fsck.read_session import read_session
from ledgers.bookie.opening import open_bookies
from ledgers.bookies import Answer, Bookies
from ledgers.clock import SystemClock
from ledgers.entry import EntryDigest
from ledgers.errors import (
    BookmenderError,
    CorruptionError,
    DigestMismatchError,
    NoSuchEntryError,
    NoSuchLedgerError,
    UnauthorizedError,
    UnavailableError,
    UnreadableError,
)
from ledgers.formats.layout import MetadataUri
from ledgers.fragments import fragments, known_fragments
from ledgers.manager import LedgerManager, VersionedMetadata
from ledgers.metadata import BookieId, DigestType
from ledgers.operations.opening import find_end
from ledgers.registration import Registration
from replication.cluster.own_state import own_path
from replication.queue.listing import marked_ledger_ids, read_marks
from replication.queue.payloads import underreplication_path

READS_AT_ONCE = 500

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """The connection settings of a cluster. ``default_*``: for ledgers whose metadata holds neither
    (version 1)."""

    metadata_service_uri: str
    default_password: str = ""
    default_digest_type: str = "CRC32"
    reads_in_flight_per_bookie: int = 16
    """Limit for one task."""

    @property
    def uri(self) -> MetadataUri:
        """The parsed URI. Raises SettingsError."""
        return MetadataUri.parse(self.metadata_service_uri)


async def ledger_rows(reach: Reach, ledger_ids: Sequence[int]) -> AsyncIterator[list[Row]]:
    """Yield a row for each ledger. A deleted ledger has none."""
    async with read_session(reach.metadata_service_uri) as (store, uri):
        manager = await LedgerManager.open(store, uri)
        for start in range(0, len(ledger_ids), READS_AT_ONCE):
            part = ledger_ids[start : start + READS_AT_ONCE]
            rows = await asyncio.gather(*(_ledger_row(manager, each) for each in part))
            yield [row for row in rows if row is not None]


async def bookie_rows(reach: Reach) -> AsyncIterator[list[Row]]:
    """Yield a row for each bookie that is registered or has a cookie."""
    async with read_session(reach.metadata_service_uri) as (store, uri):
        registration = Registration(store, uri.root)
        view, cookies = await registration.read(), await registration.cookies()
    rows = []
    for bookie in sorted({*view.available, *cookies}):
        address, cookie = view.address(bookie), cookies.get(bookie)
        is_there = "read_only" if bookie in view.read_only else "missing"
        rows.append(
            {
                "bookie": bookie,
                "state": "writable" if bookie in view.writable else is_there,
                "host": None if address is None else address[0],
                "port": None if address is None else address[1],
                "has_cookie": cookie is not None,
                "cookie_ctime_ms": None if cookie is None else cookie.ctime_ms,
            }
        )
    yield rows


async def mark_rows(reach: Reach) -> AsyncIterator[list[Row]]:
    """Yield a row for each mark, of the shared queue and of our own."""
    async with read_session(reach.metadata_service_uri) as (store, uri):
        shared = underreplication_path(uri.root)
        for queue, ur in (("shared", shared), ("own", own_path(shared))):
            marked = await read_marks(store, ur, await marked_ledger_ids(store, ur))
            yield [
                {
                    "ledger_id": each.ledger_id,
                    "queue": queue,
                    "bookies": None if each.mark is None else list(each.mark.replicas),
                    "ctime_ms": None if each.mark is None else each.mark.ctime_ms,
                    "is_readable": each.mark is not None,
                }
                for each in marked
            ]


async def entry_rows(reach: Reach, ledger_ids: Sequence[int]) -> AsyncIterator[list[Row]]:
    """Yield a row for each copy. An open ledger has rows up to its last acknowledged entry; a
    ledger that cannot be opened has none."""
    async with read_session(reach.metadata_service_uri) as (store, uri):
        manager = await LedgerManager.open(store, uri)
        view = await Registration(store, uri.root).read()
        async with open_bookies(
            view.locate,
            clock=SystemClock(),
            rng=random.Random(),
            reads_in_flight_max=reach.reads_in_flight_per_bookie,
        ) as bookies:
            for ledger_id in ledger_ids:
                async for rows in _entries_of(ledger_id, reach, manager, bookies):
                    yield rows


# --- One ledger --------------------------------------------------------------------------------------


async def _ledger_row(manager: LedgerManager, ledger_id: int) -> Row | None:
    try:
        versioned = await manager.read(ledger_id)
    except NoSuchLedgerError:
        return None
    except (CorruptionError, UnauthorizedError) as error:
        return {"ledger_id": ledger_id, "error": str(error)}
    return ledger_row(versioned)


def ledger_row(versioned: VersionedMetadata) -> Row:
    metadata, stat = versioned.metadata, versioned.stat
    is_closed, digest_type = metadata.is_closed, metadata.digest_type
    settled = metadata.last_segment.first_entry_id - 1
    return {
        "ledger_id": versioned.ledger_id,
        "state": metadata.state.name.lower(),
        "ensemble_size": metadata.ensemble_size,
        "write_quorum": metadata.write_quorum,
        "ack_quorum": metadata.ack_quorum,
        "last_entry_id": metadata.last_entry_id if is_closed else None,
        "length": metadata.length if is_closed else None,
        "digest_type": None if digest_type is None else digest_type.name,
        "ctime_ms": metadata.ctime_ms,
        "format_version": metadata.metadata_version,
        "metadata_version": stat.version,
        "mtime_ms": stat.mtime_ms,
        "custom": list(metadata.custom),
        "fragments": [
            {
                "first_entry_id": fragment.first_entry_id,
                "last_entry_id": fragment.last_entry_id,
                "ensemble": list(fragment.ensemble),
            }
            for fragment in fragments(versioned.ledger_id, metadata, lac=settled)
        ],
    }


async def _entries_of(
    ledger_id: int, reach: Reach, manager: LedgerManager, bookies: Bookies
) -> AsyncIterator[list[Row]]:
    fallback = EntryDigest(DigestType[reach.default_digest_type], reach.default_password.encode())
    try:
        versioned = await manager.read(ledger_id)
        opened = await find_end(versioned, bookies=bookies, clock=SystemClock(), fallback=fallback)
    except (NoSuchLedgerError, CorruptionError, UnauthorizedError, UnavailableError):
        return
    known = known_fragments(ledger_id, versioned.metadata, lac=opened.lac)
    copies = chain.from_iterable(
        ((bookie, entry_id) for entry_id in fragment.entries_of(index))
        for fragment in known
        for index, bookie in enumerate(fragment.ensemble)
    )
    while part := [each for each, _ in zip(copies, range(READS_AT_ONCE), strict=False)]:
        yield await asyncio.gather(
            *(_entry_row(ledger_id, each, bookie, opened.digest, bookies) for bookie, each in part)
        )


async def _entry_row(
    ledger_id: int, entry_id: int, bookie: BookieId, digest: EntryDigest, bookies: Bookies
) -> Row:
    row: Row = {"ledger_id": ledger_id, "entry_id": entry_id, "bookie": bookie}
    try:
        entry = await bookies.read(bookie, ledger_id, entry_id)
        header = digest.check(entry, ledger_id=ledger_id, entry_id=entry_id)
    except BookmenderError as error:
        return {**row, "answer": _answer(error).value}
    payload = digest.payload(entry)
    return {
        **row,
        "answer": Answer.PRESENT.value,
        "entry_bytes": len(entry),
        "payload_bytes": len(payload),
        "payload_crc32c": google_crc32c.value(payload),
        "length": header.length,
        "lac": header.lac,
    }


def _answer(error: BookmenderError) -> Answer:
    match error:
        case NoSuchEntryError():
            return Answer.ABSENT
        case DigestMismatchError():
            return Answer.MISMATCH
        case UnreadableError():
            return Answer.UNREADABLE
        case _:
            return Answer.UNKNOWN
