"""Tells the bookie clients about bookies that register again."""

from ledgers.bookie.bulk.transfers import BulkTransfers
from ledgers.bookie.client import BookieClient
from replication.cluster.cluster_view import ViewSource


async def tell_of_returns(views: ViewSource, bookies: BookieClient, bulk: BulkTransfers) -> None:
    """When a bookie registers again, drop what the clients know of its failures. Runs until
    cancelled."""
    while True:
        seen, before = views.change_count, views.current
        await views.wait_change(seen)
        for bookie in views.current.available:
            if views.current.czxid(bookie) != before.czxid(bookie):
                bookies.bookie_returned(bookie)
                bulk.bookie_returned(bookie)
