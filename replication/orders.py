"""What an operator has ordered of the whole cluster: bookies to drain, maintenance windows, limits.

Below ``<ur>/bookmender/orders``: ``draining/<bookie id>``, ``maintenance/<bookie id>`` and ``limits``.
Every session of ours sees them as part of its ``ClusterView``. An order that cannot be read (a later
release's, a slip of somebody's hand) is reported and passed over; it never stops a node.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ledgers.metadata import BookieId


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainOrder:
    """Move all that the bookie holds elsewhere, while it serves (rule S16)."""

    since_ms: int
    may_fence: bool = False
    """Whether open ledgers on it are to be recovered and closed, instead of left until they close."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MaintenanceWindow:
    """The bookie may be away until then: neither lost nor a target. Wall-clock milliseconds."""

    since_ms: int
    until_ms: int
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsOrder:
    """What each node may cost, in place of its settings; None: as its settings say. 0: no limit."""

    bytes_per_s: int | None = None
    entries_per_s: int | None = None
    reads_in_flight_per_bookie: int | None = None
    requests_per_s: int | None = None
    yields_to_writers: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """All of them at one moment; windows that are over are not among them."""

    draining: Mapping[BookieId, DrainOrder] = field(default_factory=dict)
    maintenance: Mapping[BookieId, MaintenanceWindow] = field(default_factory=dict)
    limits: LimitsOrder = field(default_factory=LimitsOrder)
