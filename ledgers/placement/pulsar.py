"""Reads what Apache Pulsar stores about bookies, as JSON.

- Racks (Pulsar's BookieRackAffinityMapping): groups of bookies; each bookie, by id or address, with
  its ``rack`` and, for people, its ``hostname``.
- Bookie isolation (EnsemblePlacementPolicyConfig) in the custom metadata of a ledger:
  ``policyClass``, and ``properties`` with two lists of groups.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from ledgers.errors import CorruptionError
from ledgers.model import BookieId, LedgerMetadata
from ledgers.placement.topology import clean_rack
from ledgers.typed import decode_json

PULSAR_RACKS_PATH = "/bookies"
_UNDECODABLE = (ValueError, RecursionError)
"""The errors of msgspec, of UTF-8, and of deep nesting."""


def parse_pulsar_racks(data: bytes) -> dict[str, str]:
    """Return the racks by the names of bookies, and by host names that no bookie has as its name. A
    bookie in two groups has the rack of the last one. Raises CorruptionError."""
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
    """Return the bookies of each group. Raises CorruptionError."""
    return {group: frozenset(map(BookieId, bookies)) for group, bookies in _decode(data).items()}


def _decode(data: bytes) -> dict[str, dict[str, dict[str, Any]]]:
    try:
        return decode_json(data, dict[str, dict[str, dict[str, Any]]])
    except _UNDECODABLE as error:
        raise CorruptionError("not a map of groups, bookies and racks", error=str(error)) from error


CONFIG_KEY = "EnsemblePlacementPolicyConfig"
ANY_GROUP = "*"
"""Stands for any bookie, as for Pulsar's system topics."""
POLICY_CLASSES = frozenset(
    f"org.apache.pulsar.{package}IsolatedBookieEnsemblePlacementPolicy"
    for package in ("bookie.rackawareness.", "zookeeper.Zk")
)
"""The present class name, and the name before Pulsar 2.9."""


class Isolation(msgspec.Struct, frozen=True):
    """The groups whose bookies may store a ledger. ``secondary``: if the primary are too few."""

    primary: frozenset[str]
    secondary: frozenset[str] = frozenset()


class _Config(msgspec.Struct):
    policyClass: str = ""  # noqa: N815
    properties: Mapping[str, Any] = msgspec.field(default_factory=dict)


def isolation_of(metadata: LedgerMetadata) -> Isolation | None:
    """Return the isolation of a ledger; None if it may be on any bookie. A configuration that
    cannot be parsed also means any bookie, as in Pulsar."""
    data = dict(metadata.custom).get(CONFIG_KEY)
    if data is None:
        return None
    try:
        config = decode_json(data, _Config)
    except _UNDECODABLE:
        return None
    if config.policyClass not in POLICY_CLASSES:
        return None
    primary = _groups(config.properties.get("isolationBookieGroups"))
    secondary = _groups(config.properties.get("secondaryIsolationBookieGroups"))
    return None if not primary or ANY_GROUP in primary else Isolation(primary, secondary)


def _groups(value: object) -> frozenset[str]:
    """Parse names joined by commas, or a list of such strings."""
    texts = value if isinstance(value, list) else [value or ""]
    return frozenset(name for text in texts for name in str(text).split(",") if name)
