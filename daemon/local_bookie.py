"""The bookie on this host: the configured one, or the only one registered with this host's
address."""

import asyncio
import socket
from collections.abc import Collection

from ledgers.codec.registration import parse_address
from ledgers.model import BookieId
from ledgers.tasks import in_daemon_thread
from replication.cluster import ClusterView

LOOKUP_MAX_S = 3.0
"""Time that the resolver has for the names and addresses of this host."""


async def local_bookie(configured: str, view: ClusterView) -> BookieId | None:
    """Return the bookie on this host; None if none or several bookies belong to it.

    An absent bookie counts by its id, which usually starts with its host. After an outage of
    ZooKeeper the first of several local bookies to return is therefore not mistaken for the only
    one.
    """
    return BookieId(configured) if configured else _only_one_here(view, await own_addresses())


def _only_one_here(view: ClusterView, addresses: Collection[str]) -> BookieId | None:
    here = {
        bookie
        for bookie, registered in view.bookies.available.items()
        if registered.address is not None and registered.address.host in addresses
    }
    away = map(parse_address, view.cookies.keys() - view.available)
    is_one_away = any(address is not None and address.host in addresses for address in away)
    return next(iter(here)) if len(here) == 1 and not is_one_away else None


async def own_addresses() -> frozenset[str]:
    """Return the names and addresses with which a bookie on this host may register."""
    addresses = {"localhost", "127.0.0.1", "::1", socket.gethostname()}
    try:
        async with asyncio.timeout(LOOKUP_MAX_S):
            addresses |= await in_daemon_thread(_looked_up)
    except TimeoutError:  # no name server answers
        pass
    return frozenset(addresses)


def _looked_up() -> set[str]:
    host = socket.gethostname()
    try:
        found = socket.getaddrinfo(host, None)
    except OSError:  # a host that cannot resolve its own name
        found = []
    return {socket.getfqdn(), *(str(address[0]) for *_, address in found)}
