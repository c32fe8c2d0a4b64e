"""The racks of bookies: the names under which to look them up, and the racks of absent bookies.

A source of racks (a file, a script, Pulsar's znode) may name a bookie by its id, its address, its
host or its IP address, as BookKeeper's resolvers do.
"""

from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType

from ledgers.codec.registration import Address, parse_address
from ledgers.model import BookieId
from ledgers.placement.rules import DEFAULT_RACK


def clean_rack(text: str) -> str | None:
    """Return a location in normal form, ``/rack`` or ``/region/rack``; None if it is empty. The
    leading slash may be missing, as in Pulsar's BookieRackAffinityMapping."""
    parts = [part for part in text.strip().split("/") if part]
    return f"/{'/'.join(parts)}" if parts else None


def names_of(bookie: BookieId, address: Address | None, ip: str | None = None) -> tuple[str, ...]:
    """Return the names that a source may use for the bookie, the most exact first: id,
    ``host:port``, host and IP address. ``address``: as registered; None: the address in the id."""
    address = address or parse_address(bookie)
    names: list[str] = [bookie]
    if address is not None:
        names += [f"{address.host}:{address.port}", address.host]
    if ip is not None:
        names.append(ip)
    return tuple(dict.fromkeys(names))


def find_rack(names: Iterable[str], table: Mapping[str, str]) -> str | None:
    return next((table[name] for name in names if name in table), None)


class Racks:
    """The rack of every bookie ever seen. An absent bookie keeps its last known rack (G19)."""

    def __init__(self, remembered: Mapping[BookieId, str] = MappingProxyType({})) -> None:
        """``remembered``: last known racks, as stored earlier."""
        self._racks = dict(remembered)

    def rack(self, bookie: BookieId) -> str:
        """Return the rack of a bookie; the default rack if it was never known."""
        return self._racks.get(bookie, DEFAULT_RACK)

    def rack_if_known(self, bookie: BookieId) -> str | None:
        return self._racks.get(bookie)

    @property
    def known(self) -> Mapping[BookieId, str]:
        """All known racks. Bookies in the default rack are left out."""
        return self._racks

    def learn(self, found: Mapping[BookieId, str], *, present: Collection[BookieId]) -> bool:
        """Update the racks, and return True if any changed. A present bookie that is not in
        ``found`` no longer has a rack; an absent one keeps its rack."""
        away = {bookie: rack for bookie, rack in self._racks.items() if bookie not in present}
        before, self._racks = self._racks, {**away, **found}
        return before != self._racks

    def __len__(self) -> int:
        return len(self._racks)
