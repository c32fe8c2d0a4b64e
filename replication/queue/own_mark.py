"""A mark in our own queue that is made in the same transaction as another write.

Java's workers do not look there. The mark names no bookie: nodes check every copy's ends.
"""

from collections.abc import Sequence
from contextlib import suppress

from ledgers.clock import Clock
from ledgers.errors import NoNodeError
from ledgers.store import Create, MetadataStore, SetData
from replication.cluster.membership import ensure
from replication.cluster.own_state import own_path
from replication.queue import payloads
from replication.queue.payloads import Mark


async def own_mark_operations(
    store: MetadataStore, ur: str, ledger_id: int, clock: Clock
) -> Sequence[Create | SetData]:
    """Return the operations that mark the ledger. They fail if the mark or its directories change
    first.

    A mark that stands stays: nothing deletes it while the caller holds the lock (rule S6). It is
    written again as it is, so that a worker that read it before, with the ledger's note, does not
    take it.
    """
    path = payloads.mark_path(own_path(ur), ledger_id)
    directory = path.rpartition("/")[0]
    with suppress(NoNodeError):
        data, stat = await store.get(path)
        return [SetData(path=path, data=data, version=stat.version)]
    mark = Create(path=path, data=payloads.mark_to_bytes(Mark(ctime_ms=clock.wall_ms())))
    if await store.exists(directory) is not None:  # a crash left it behind
        return [mark]
    await ensure(store, directory.rpartition("/")[0])
    return [Create(path=directory), mark]
