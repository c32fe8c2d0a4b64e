"""Bookies that come back, and who is to know of it."""

from ledgers.bookie.bulk.transfers import BulkTransfers
from ledgers.bookie.client import BookieClient
from replication.cluster.cluster_view import ViewSource


async def tell_of_returns(views: ViewSource, bookies: BookieClient, bulk: BulkTransfers) -> None:
    """A bookie that registered anew is worth a connection at once, whatever was learned of it."""
    while True:
        seen, before = views.change_count, views.current
        await views.wait_change(seen)
        for bookie in views.current.available:
            if views.current.czxid(bookie) != before.czxid(bookie):
                bookies.bookie_returned(bookie)
                bulk.bookie_returned(bookie)
