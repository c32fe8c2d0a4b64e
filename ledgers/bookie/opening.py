"""A client of the bookies as most of those need it who speak to them: with a bulk path that nobody
steers."""

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ledgers.bookie.budget import READS_IN_FLIGHT_DEFAULT, Budgets
from ledgers.bookie.bulk.transfers import BulkTransfers
from ledgers.bookie.client import BookieClient, BookieClientSettings
from ledgers.clock import Clock
from ledgers.formats.bookie_info import Resolve, spelled_address


@asynccontextmanager
async def open_bookies(
    resolve: Resolve = spelled_address,
    *,
    clock: Clock,
    rng: random.Random,
    reads_in_flight_max: int = READS_IN_FLIGHT_DEFAULT,
) -> AsyncIterator[BookieClient]:
    """Closed at the end. ``resolve``: by default ids are read as ``host:port``.

    ``reads_in_flight_max``: at one bookie, single reads and bulk together (rule S10).
    """
    budgets = Budgets(reads_in_flight_max=reads_in_flight_max)
    bookies = BookieClient(
        resolve=resolve,
        budgets=budgets,
        bulk=BulkTransfers(budgets, resolve=resolve),
        clock=clock,
        rng=rng,
        settings=BookieClientSettings(),
    )
    try:
        yield bookies
    finally:
        await bookies.close()
