"""Apache Pulsar's znode of racks (its BookieRackAffinityMapping): JSON, not BookKeeper's own.

Groups of bookies, by the id or address of each its ``rack`` and, for people, its ``hostname``.
"""

from typing import Any

import msgspec

from ledgers.errors import CorruptionError
from ledgers.metadata import BookieId
from ledgers.placement.racks import clean_rack

PULSAR_RACKS_PATH = "/bookies"


def parse_pulsar_racks(data: bytes) -> dict[str, str]:
    """Racks by what the bookie is called there. Raises CorruptionError.

    A bookie in two groups has the rack that comes last; one without a rack is left out. The host
    name counts where no bookie is called by it.
    """
    racks: dict[str, str] = {}
    hosts: dict[str, str] = {}
    for bookies in _decode(data).values():
        for name, info in bookies.items():
            rack = clean_rack(str(info.get("rack") or ""))
            if rack is not None:
                racks[name] = rack
                hosts[str(info.get("hostname") or name)] = rack
    return {**hosts, **racks}


def parse_pulsar_groups(data: bytes) -> dict[str, frozenset[BookieId]]:
    """The bookies of each group. Raises CorruptionError."""
    return {group: frozenset(map(BookieId, bookies)) for group, bookies in _decode(data).items()}


def _decode(data: bytes) -> dict[str, dict[str, dict[str, Any]]]:
    try:
        return msgspec.json.decode(data, type=dict[str, dict[str, dict[str, Any]]])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorruptionError("not a map of groups, bookies and racks", error=str(error)) from error
