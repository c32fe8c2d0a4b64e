"""How far the leader's index is, for people: ``<ur>/bookmender/index``, versioned JSON."""

import json
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from typing import Any, Self

import structlog

from auditor.index.keeper import IndexKeeper
from ledgers.clock import Clock
from ledgers.errors import UnavailableError
from ledgers.store import MetadataStore
from replication.cluster.own_state import own_path, read_record, switch, time_ms, whole

log = structlog.get_logger()

LOOK_S = 1.0
WRITE_INTERVAL_S = 10.0
"""Between two writes while a scan is under way."""
SESSION_MAX = 2**64 - 1
"""ZooKeeper's session ids have 64 bits; kazoo shows them with a sign or without."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexNote:
    """``session_id``: whose index it is. ``written_ms``: wall clock. ``read_count``: by the scan
    under way, of about ``expected_count``; 0: unknown."""

    session_id: int
    written_ms: int
    is_complete: bool
    ledger_count: int
    unreadable_count: int = 0
    read_count: int = 0
    expected_count: int = 0

    def to_json(self) -> bytes:
        return json.dumps({"version": 1, **asdict(self)}).encode()

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Self:
        """Raises CorruptionError."""
        return cls(
            session_id=whole(record, "session_id", least=-SESSION_MAX, most=SESSION_MAX),
            written_ms=time_ms(record, "written_ms"),
            is_complete=switch(record, "is_complete"),
            ledger_count=whole(record, "ledger_count"),
            unreadable_count=whole(record, "unreadable_count"),
            read_count=whole(record, "read_count"),
            expected_count=whole(record, "expected_count"),
        )


async def read_index_note(store: MetadataStore, ur: str) -> IndexNote | None:
    """None when there is none, or a later release tells of it in another way."""
    return await read_record(store, index_note_path(ur), IndexNote.from_record)


def index_note_path(ur: str) -> str:
    return f"{own_path(ur)}/index"


class IndexTeller:
    """Writes the note when the index is complete, when it is not any more, and now and then
    between."""

    def __init__(
        self,
        keeper: IndexKeeper,
        write: Callable[[IndexNote], Awaitable[None]],
        *,
        session_id: int,
        clock: Clock,
    ) -> None:
        self._keeper = keeper
        self._write = write
        self._session_id = session_id
        self._clock = clock
        self._written: IndexNote | None = None

    async def run(self) -> None:
        """Until cancelled. Raises SessionLostError or LeadershipLostError."""
        while True:
            try:
                await self.run_once()
            except (
                UnavailableError
            ) as error:  # it is a help, no more: the next write tells all of it
                log.warning("index.note_unwritten", error=str(error))
            await self._clock.sleep(LOOK_S)

    async def run_once(self) -> None:
        """Write if there is something new to tell."""
        note = self._note()
        if self._is_news(note):
            await self._write(note)
            self._written = note

    def _note(self) -> IndexNote:
        keeper, progress = self._keeper, self._keeper.progress
        return IndexNote(
            session_id=self._session_id,
            written_ms=self._clock.wall_ms(),
            is_complete=keeper.is_complete,
            ledger_count=len(keeper.index),
            unreadable_count=keeper.index.unreadable_count,
            read_count=progress.read_count if progress else 0,
            expected_count=progress.expected_count if progress else 0,
        )

    def _is_news(self, note: IndexNote) -> bool:
        before = self._written
        if before is None or before.is_complete != note.is_complete:
            return True
        is_due = note.written_ms - before.written_ms >= WRITE_INTERVAL_S * 1000
        return is_due and not note.is_complete
