"""The limits of one executor, which the owner of the run's budget sets.

The engine follows each new limit at once. ``FixedPace`` sets the limits of the options, as if no
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
    """What one executor may request: from all bookies together per second, and from each bookie at
    a time."""

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
"""Takes effect at once. None: read nothing until the next share."""


class ReadPace(Protocol):
    """Supplies one executor's share, and each change of it."""

    async def run(self, apply: Apply) -> None:
        """Call ``apply`` with the first share as soon as there is one, and after every change,
        until cancelled.

        Nothing is read before the first share. An error raised here ends the inspection, which
        raises it again. On cancellation the share is given back.
        """
        ...


BeginPace = Callable[[FsckOptions, MetadataStore, str], ReadPace]
"""Called with the options, the session of this executor (which may write), and the path
``underreplication``."""


class FixedPace:
    """Applies the limits of the options, regardless of other readers."""

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
