"""One run as it is ordered, and how far it is: what its command and the job on Spark tell each
other."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ledgers.errors import SettingsError


@dataclass(frozen=True, slots=True, kw_only=True)
class FsckJob:
    """What only the driver needs to know; ``FsckOptions`` is what each executor does."""

    run: str
    """Its name: UTC, as in ``20261121T193500Z``, so that runs sort by their time. It stands in
    paths."""
    output: Path
    """Of the results. It is there, and no other run writes there now."""
    checked_within_s: float = 0.0
    """Closed ledgers that an earlier run found whole so lately, as closely, and whose metadata was
    not written since, are left out. 0: none is."""
    time_budget_s: float = 0.0
    """After so long no further part is begun; those looked at as closely the longest ago come
    first. 0: no end."""
    partition_count: int = 0
    """Parts that the ledgers are looked at in, if there are as many ledgers, whatever a part then
    weighs. 0: by what there is to be read, and the cores."""

    def __post_init__(self) -> None:
        for name in ("checked_within_s", "time_budget_s", "partition_count"):
            if getattr(self, name) < 0:
                raise SettingsError.not_allowed(name, getattr(self, name), "0 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class FsckProgress:
    """How far a run is, of all its executors together."""

    phase: str
    """For people: ``listing``, ``weighing``, ``looking``, ``looking again``, ``writing``."""
    ledgers_done: int = 0
    ledgers_expected: int = 0
    """0: not known yet."""
    work_done: int = 0
    work_expected: int = 0
    """What takes the time: copies to be read, or ledgers where that is much alike. 0: not known
    yet."""
    entries_read: int = 0
    bytes_read: int = 0


OnProgress = Callable[[FsckProgress], None]
"""Called in the driver, from any thread, a few times a second at most."""
