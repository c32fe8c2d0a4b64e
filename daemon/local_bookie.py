"""Which bookie stands on this host: the one that the settings name, or the only one registered here."""

import socket
from collections.abc import Collection

from ledgers.metadata import BookieId
from ledgers.registration import BookieView


def local_bookie(configured: str, view: BookieView) -> BookieId | None:
    """None where no bookie, or more than one, is registered with an address of this host."""
    return BookieId(configured) if configured else _only_one_here(view, own_addresses())


def _only_one_here(view: BookieView, addresses: Collection[str]) -> BookieId | None:
    here = [
        bookie
        for bookie, registered in view.available.items()
        if registered.address is not None and registered.address[0] in addresses
    ]
    return here[0] if len(here) == 1 else None


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
