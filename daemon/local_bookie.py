"""Which bookie stands on this host: the one that the settings name, or the only one registered here."""

import socket
from collections.abc import Collection

from ledgers.formats.bookie_info import parse_address
from ledgers.metadata import BookieId
from replication.cluster.cluster_view import ClusterView


def local_bookie(configured: str, view: ClusterView) -> BookieId | None:
    """None where no bookie, or more than one, is registered with an address of this host.

    One that is away counts by its id, which mostly begins with its host: right after an outage of
    ZooKeeper the first of several that is back is not the only one.
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
    """The names and addresses that a bookie of this host may be registered with."""
    host = socket.gethostname()
    addresses = {"localhost", "127.0.0.1", "::1", host, socket.getfqdn()}
    try:
        found = socket.getaddrinfo(host, None)
    except OSError:  # a host that cannot resolve its own name
        found = []
    addresses.update(str(address[0]) for *_, address in found)
    return frozenset(addresses)
