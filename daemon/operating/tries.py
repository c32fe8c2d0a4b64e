"""Having a marked ledger tried at once, when its world has changed in a way that no node sees by
itself.

What it waits for stands in its note, and in what each node remembers of it. So the note binds
nobody any more, and an order that all nodes follow tells them to forget it.
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress

from ledgers.clock import Clock
from ledgers.errors import ConflictError
from ledgers.store import Check, MetadataStore
from replication.cluster.order_book import OrderBook, tries_place
from replication.cluster.orders import TriesOrder
from replication.cluster.own_state import own_path
from replication.queue.listing import read_marks
from replication.waiting.notes import WaitingNotes

GIVES_MAX = 10
"""Others may order tries at the same moment; who loses so often leaves the ledger to its next
try."""


async def try_now(
    ledger_id: int, store: MetadataStore, ur: str, *, guards: Sequence[Check], clock: Clock
) -> None:
    """Nothing happens to one that is not marked. ``guards``: prove that the caller holds it (rule
    S3).

    Raises LockLostError when they do not.
    """
    if not await _is_marked(ledger_id, store, ur):
        return
    await WaitingNotes(store, ur).let_go(ledger_id, guards=guards)
    await order_tries([ledger_id], store, ur, clock)


async def _is_marked(ledger_id: int, store: MetadataStore, ur: str) -> bool:
    return any([await read_marks(store, queue, [ledger_id]) for queue in (ur, own_path(ur))])


async def order_tries(
    ledger_ids: Iterable[int], store: MetadataStore, ur: str, clock: Clock
) -> None:
    """Whose notes bind nobody any more: the nodes are to forget them."""
    ledger_ids = list(ledger_ids)
    book, place = OrderBook(store, ur), tries_place(ur)
    for _ in range(GIVES_MAX):
        standing = await book.standing(place)
        before = TriesOrder() if standing is None or standing.order is None else standing.order
        order = before
        for ledger_id in ledger_ids:
            order = order.with_ledger(ledger_id, now_ms=clock.wall_ms())
        with suppress(ConflictError):
            await book.give(place, order, over=standing)
            return
