"""The bookie on this host: the configured one, or the only one registered with this host's
address."""

import socket
from collections.abc import Collection

from ledgers.codec.registration import parse_address
from ledgers.model import BookieId
from replication.cluster import ClusterView


def local_bookie(configured: str, view: ClusterView) -> BookieId | None:
    """Return the bookie on this host; None if none or several bookies belong to it.

    An absent bookie counts by its id, which usually starts with its host. After an outage of
    ZooKeeper the first of several local bookies to return is therefore not mistaken for the only
    one.
    """
    return BookieId(configured) if configured else _only_one_here(view, own_addresses())


def _only_one_here(view: ClusterView, addresses: Collection[str]) -> BookieId | None:
    here = {
        bookie
        for bookie, registered in view.bookies.available.items()
        if registered.address is not None and registered.address.host in addresses
    }
    away = map(parse_address, view.cookies.keys() - view.available)
    is_one_away = any(address is not None and address.host in addresses for address in away)
    return next(iter(here)) if len(here) == 1 and not is_one_away else None


def own_addresses() -> frozenset[str]:
    """Return the names and addresses with which a bookie on this host may register."""
    host = socket.gethostname()
    addresses = {"localhost", "127.0.0.1", "::1", host, socket.getfqdn()}
    try:
        found = socket.getaddrinfo(host, None)
    except OSError:  # a host that cannot resolve its own name
        found = []
    addresses.update(str(address[0]) for *_, address in found)
    return frozenset(addresses)
