"""How far a ledger reaches by what its bookies say, without fencing it: a guess, of one that is written.

It proves no end (``recovery`` finds that), but whether somebody still writes.
"""

import asyncio
from collections.abc import Iterable

from ledgers.bookies import LAST_ENTRY, Bookies
from ledgers.entry import EntryDigest, EntryHeader
from ledgers.errors import BookmenderError, NoSuchEntryError
from ledgers.metadata import BookieId

NO_ENTRY = -1


async def last_entry_id(
    bookies: Bookies, bookie: BookieId, ledger_id: int, *, digest: EntryDigest | None = None
) -> int | None:
    """The last entry that one bookie stores, ``NO_ENTRY`` for none; None when it does not say.

    Given a ``digest``, only an entry that it fits is believed.
    """
    try:
        entry = await bookies.read(bookie, ledger_id, LAST_ENTRY)
        if digest is not None:
            digest.check(entry, ledger_id=ledger_id, entry_id=LAST_ENTRY)
        return EntryHeader.of(entry).entry_id
    except NoSuchEntryError:
        return NO_ENTRY
    except BookmenderError:
        return None


async def highest_entry_id(
    bookies: Bookies,
    members: Iterable[BookieId],
    ledger_id: int,
    *,
    digest: EntryDigest | None = None,
) -> int | None:
    """The last that any of them stores; None when none of them says."""
    told = await asyncio.gather(
        *(last_entry_id(bookies, each, ledger_id, digest=digest) for each in members)
    )
    return max((each for each in told if each is not None), default=None)
