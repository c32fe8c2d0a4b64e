"""How much of the bookies one executor may take: told by whoever shares out the run's budget.

The engine takes what it is told when it is told. ``FixedPace`` tells it the settings, as if no
other executor ran.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from auditor.fsck.levels import FsckOptions
from ledgers.bookie.budget import reads_in_flight_max
from ledgers.store import MetadataStore


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadShare:
    """What one executor may ask, of all bookies together in a second, and of each at a time."""

    reads_per_s: int = 0
    """Entries. 0: no limit."""
    bytes_per_s: int = 0
    """Stored bytes. 0: no limit."""
    reads_in_flight_per_bookie: int = 64

    def __post_init__(self) -> None:
        assert self.reads_per_s >= 0, self
        assert self.bytes_per_s >= 0, self
        assert self.reads_in_flight_per_bookie >= 1, self


Apply = Callable[[ReadShare | None], None]
"""Takes effect at once. None: read nothing until there is a share again."""


class ReadPace(Protocol):
    """One executor's share, as it changes."""

    async def run(self, apply: Apply) -> None:
        """``apply`` the share, first as soon as there is one and then whenever it changes; until
        cancelled.

        Nothing is read before the first share. What it raises ends the inspection, and is raised
        there. Cancelled, it gives back what it held.
        """
        ...


BeginPace = Callable[[FsckOptions, MetadataStore, str], ReadPace]
"""Of the options, the session of this executor (which may write), and the path
``underreplication``."""


class FixedPace:
    """The settings, whoever else reads."""

    def __init__(self, options: FsckOptions, store: MetadataStore, ur: str) -> None:
        self._share = ReadShare(
            reads_per_s=options.reads_per_s,
            bytes_per_s=options.bytes_per_s,
            reads_in_flight_per_bookie=reads_in_flight_max(
                options.reads_in_flight_per_bookie, reader_count=1
            ),
        )

    async def run(self, apply: Apply) -> None:
        apply(self._share)
        await asyncio.Event().wait()  # it never changes
