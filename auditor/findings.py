"""What a periodic check found wrong with a ledger: ``<ur>/bookmender/findings/<ledger id>``,
versioned JSON.

A mark itself cannot say why it was made: its payload is Java's. For a lost bookie the reason
follows from ``causes``; what a check, or fsck, found stands here, one znode a ledger, until the
mark is gone. Workers go by ``bookies``, too: those are asked for all that they should have, as a
look at the ends may find nothing wrong.
"""

import json
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

import structlog

from ledgers.clock import Clock
from ledgers.errors import (
    ConflictError,
    CorruptionError,
    NodeExistsError,
    NoNodeError,
    UnauthorizedError,
    UnavailableError,
)
from ledgers.metadata import BookieId
from ledgers.operations.tasks import gather_in_parts
from ledgers.store import Create, Delete, MetadataStore, SetData, children_if_any
from replication.cluster.membership import ensure
from replication.cluster.own_state import (
    findings_path,
    ledger_id_of_name,
    own_path,
    parse_record,
    read_record,
    text,
    texts,
    time_ms,
)
from replication.queue.batching import Batcher
from replication.queue.listing import READS_AT_ONCE
from replication.queue.mark_tree import MarkTree

log = structlog.get_logger()

SWEEP_S = 60.0
"""Between two looks at which marks are gone: one that has none may have it to come, and is looked
at once more."""
SWEPT_PER_S = 200.0
"""Findings looked at; where they are many, the looks are fewer: each finding costs ZooKeeper three
reads."""

TRIES_MAX = 3
"""To write a finding whose directory is not there."""


Sighting = tuple[int, int]
"""Of a finding's znode: czxid and version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """``check``: the check's name. ``bookies``: whose copies are at fault; none for a placement.

    ``detail`` is a sentence for an operator. ``found_ms``: wall-clock.
    """

    check: str
    bookies: tuple[BookieId, ...]
    detail: str
    found_ms: int

    def beside(self, before: bytes) -> Self:
        """With the bookies of an earlier one, as it stands in its znode; alone where that cannot be
        read."""
        try:
            earlier = self.from_record(parse_record(before))
        except CorruptionError:
            return self
        return replace(self, bookies=tuple(sorted({*self.bookies, *earlier.bookies})))

    def to_json(self) -> bytes:
        return json.dumps({"version": 1, **asdict(self)}).encode()

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Self:
        """Raises CorruptionError."""
        return cls(
            check=text(record, "check"),
            bookies=tuple(map(BookieId, texts(record, "bookies"))),
            detail=text(record, "detail"),
            found_ms=time_ms(record, "found_ms"),
        )


class Findings:
    """The leader's: written through ``batcher``, whose guards prove the leadership (rule S9)."""

    def __init__(self, store: MetadataStore, batcher: Batcher, ur: str, clock: Clock) -> None:
        self._store, self._batcher, self._ur = store, batcher, ur
        self._clock = clock
        self._has_directory = False
        self._unmarked: dict[int, Sighting] = {}
        """Findings that had no mark at the last look."""

    async def write(
        self, ledger_id: int, check: str, bookies: Collection[BookieId], detail: str
    ) -> None:
        """To be followed by the mark, within ``SWEEP_S``. A later finding takes an earlier one's
        place, and adds its bookies to those: what was found first may not be mended yet.

        Raises UnavailableError.
        """
        finding = Finding(
            check=check,
            bookies=tuple(sorted(bookies)),
            detail=detail,
            found_ms=self._clock.wall_ms(),
        )
        path = findings_path(self._ur, ledger_id)
        for _ in range(TRIES_MAX):
            await self._make_directory()
            try:
                return await self._put(path, finding)
            except NoNodeError:  # somebody's hand took the directory away, or it was swept just now
                self._has_directory = False
            except ConflictError:
                continue  # somebody else's finding
        raise UnavailableError(
            "a finding is deleted, or written by others, again and again", path=path
        )

    async def _put(self, path: str, finding: Finding) -> None:
        """Raises NoNodeError where there is no directory, and like ConflictError when others were
        quicker."""
        try:
            await self._batcher.apply(Create(path=path, data=finding.to_json()))
        except NodeExistsError:
            data, stat = await self._store.get(path)
            data = finding.beside(data).to_json()
            await self._batcher.apply(SetData(path=path, data=data, version=stat.version))

    async def run(self) -> None:
        """Sweep now and then, until cancelled. Raises SessionLostError or LeadershipLostError."""
        seen_count = 0
        while True:
            await self._clock.sleep(SWEEP_S + seen_count / SWEPT_PER_S)
            try:
                seen_count = await self.sweep()
            except (UnavailableError, UnauthorizedError) as error:  # its rest goes with the next
                log.warning("findings.sweep_failed", error=str(error), retry_s=SWEEP_S)

    async def sweep(self) -> int:
        """Remove the findings whose marks are gone: their ledgers were repaired, or found whole.

        Returns how many were looked at.
        """
        ledger_ids = await _noted(self._store, self._ur)
        found = await gather_in_parts(self._sweep_one, ledger_ids, at_once=READS_AT_ONCE)
        self._unmarked = {
            ledger_id: seen
            for ledger_id, seen in zip(ledger_ids, found, strict=True)
            if seen is not None
        }
        return len(ledger_ids)

    async def _sweep_one(self, ledger_id: int) -> Sighting | None:
        """None unless it has no mark, and is to be looked at once more."""
        path = findings_path(self._ur, ledger_id)
        try:
            stat = await self._store.exists(path)
            if stat is None or await self._is_marked(ledger_id):
                return None
            seen = (stat.czxid, stat.version)
            if self._unmarked.get(ledger_id) != seen:
                return seen
            # A finding that was written since has a mark to come.
            with suppress(NoNodeError, ConflictError):
                await self._batcher.apply(Delete(path=path, version=stat.version))
        except UnauthorizedError as error:
            log.warning("finding.shut_away", ledger_id=ledger_id, error=str(error))
        return None

    async def _is_marked(self, ledger_id: int) -> bool:
        trees = (MarkTree(self._store, self._ur), MarkTree(self._store, own_path(self._ur)))
        return any([await tree.holds(ledger_id) for tree in trees])

    async def _make_directory(self) -> None:
        """Not through the batcher: what is there by another's transaction of a batch goes if the
        batch fails.

        It is empty, and proves nothing, so that it needs no guard."""
        if not self._has_directory:
            await ensure(self._store, findings_path(self._ur))
            self._has_directory = True


async def read_findings(
    store: MetadataStore, ur: str, ledger_ids: Sequence[int]
) -> dict[int, Finding]:
    """Those of the ledgers that have one which can be read."""
    noted = await _noted(store, ur)
    wanted = sorted(set(noted).intersection(ledger_ids))

    async def read(ledger_id: int) -> Finding | None:
        try:
            return await read_record(store, findings_path(ur, ledger_id), Finding.from_record)
        except UnauthorizedError as error:
            log.warning("finding.shut_away", ledger_id=ledger_id, error=str(error))
            return None

    findings = await gather_in_parts(read, wanted, at_once=READS_AT_ONCE)
    return {i: each for i, each in zip(wanted, findings, strict=True) if each is not None}


async def _noted(store: MetadataStore, ur: str) -> list[int]:
    """Ledgers that have a finding, ascending."""
    names = await children_if_any(store, findings_path(ur))
    return sorted(i for i in map(ledger_id_of_name, names) if i is not None)
