"""Where the bookies are: names to look them up by, and a memory of those that are away.

A source of racks (a file, a script, Pulsar's znode) may call a bookie by its id, its address, its
host or its IP address, as BookKeeper's resolvers do.
"""

from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType

from ledgers.formats.bookie_info import Address, parse_address
from ledgers.metadata import BookieId
from ledgers.placement.policy import DEFAULT_RACK


def clean_rack(text: str) -> str | None:
    """A location as the policies write it, ``/rack`` or ``/region/rack``; None where it says
    nothing.

    Without its first slash it is understood, as by Pulsar's BookieRackAffinityMapping.
    """
    parts = [part for part in text.strip().split("/") if part]
    return f"/{'/'.join(parts)}" if parts else None


def names_of(bookie: BookieId, address: Address | None, ip: str | None = None) -> tuple[str, ...]:
    """What a source may call the bookie, the most exact first: id, ``host:port``, host, IP address.

    ``address``: the one that it registered; where that is not known, the one that its id spells
    out.
    """
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
    """The rack of every bookie that ever was in sight: one that is away is where it was (G19)."""

    def __init__(self, remembered: Mapping[BookieId, str] = MappingProxyType({})) -> None:
        """``remembered``: where they were when somebody last knew."""
        self._racks = dict(remembered)

    def rack(self, bookie: BookieId) -> str:
        """The default rack for a bookie of which nobody ever knew."""
        return self._racks.get(bookie, DEFAULT_RACK)

    def rack_if_known(self, bookie: BookieId) -> str | None:
        return self._racks.get(bookie)

    @property
    def known(self) -> Mapping[BookieId, str]:
        """But for those in the default rack."""
        return self._racks

    def learn(self, found: Mapping[BookieId, str], *, present: Collection[BookieId]) -> bool:
        """``found``: all that is known now. Whoever is present, and not in it, is in no rack any
        more.

        Whether anything has changed by it.
        """
        away = {bookie: rack for bookie, rack in self._racks.items() if bookie not in present}
        before, self._racks = self._racks, {**away, **found}
        return before != self._racks

    def __len__(self) -> int:
        return len(self._racks)
