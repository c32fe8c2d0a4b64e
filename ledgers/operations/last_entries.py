"""How far a ledger reaches by what its bookies say, without fencing it: a guess, of one that is
written.

It proves no end (``recovery`` finds that), but whether somebody still writes.
"""

import asyncio
from collections.abc import Collection
from dataclasses import dataclass

from ledgers.bookies import LAST_ENTRY, Bookies
from ledgers.entry import EntryDigest, EntryHeader
from ledgers.errors import BookmenderError, NoSuchEntryError
from ledgers.metadata import BookieId

NO_ENTRY = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class LastEntry:
    """The last entry that a bookie stores of a ledger, and the LAC in its header; ``NO_ENTRY`` each
    where it has none."""

    last_entry_id: int
    lac: int
    stored_bytes: int = 0


async def last_entry_of(
    bookies: Bookies, bookie: BookieId, ledger_id: int, *, digest: EntryDigest | None = None
) -> LastEntry | None:
    """By what the bookie says; None when it does not say. Given a ``digest``, only an entry that it
    fits is believed."""
    try:
        entry = await bookies.read(bookie, ledger_id, LAST_ENTRY)
        if digest is not None:
            digest.check(entry, ledger_id=ledger_id, entry_id=LAST_ENTRY)
        header = EntryHeader.of(entry)
        return LastEntry(last_entry_id=header.entry_id, lac=header.lac, stored_bytes=len(entry))
    except NoSuchEntryError:
        return LastEntry(last_entry_id=NO_ENTRY, lac=NO_ENTRY)
    except BookmenderError:
        return None


async def last_entry_id(
    bookies: Bookies, bookie: BookieId, ledger_id: int, *, digest: EntryDigest | None = None
) -> int | None:
    """The last entry that one bookie stores, ``NO_ENTRY`` for none; else as ``last_entry_of``."""
    last = await last_entry_of(bookies, bookie, ledger_id, digest=digest)
    return None if last is None else last.last_entry_id


async def highest_entry_id(
    bookies: Bookies,
    members: Collection[BookieId],
    ledger_id: int,
    *,
    digest: EntryDigest | None = None,
) -> tuple[int, frozenset[BookieId]]:
    """The last that any of them stores, ``NO_ENTRY`` for none; and who does not say anything, and
    may have later ones."""
    ids = await asyncio.gather(
        *(last_entry_id(bookies, each, ledger_id, digest=digest) for each in members)
    )
    told = dict(zip(members, ids, strict=True))
    # One whose last entry is damaged says something.
    silent = frozenset(
        [
            bookie
            for bookie, last in told.items()
            if last is None
            and (digest is None or await last_entry_id(bookies, bookie, ledger_id) is None)
        ]
    )
    return max((each for each in ids if each is not None), default=NO_ENTRY), silent
