"""At which bookies clients are active: ``<ur>/bookmender/activity``, versioned JSON, the leader's.

The leader watches whether entries are added to open ledgers (``auditor.activity``), and workers keep to what it says
(``ledgers.bookie.bulk.flow``). A record that was not written again for a few seconds says nothing: its leader may be
gone.
"""

import asyncio
import json
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Self

import structlog

from ledgers.bookie.bulk.flow import Activity
from ledgers.changing import Changing
from ledgers.clock import Clock
from ledgers.errors import (
    CorruptionError,
    NoNodeError,
    SessionLostError,
    UnauthorizedError,
    UnavailableError,
)
from ledgers.metadata import BookieId
from ledgers.store import MetadataStore
from replication.cluster.own_state import own_path, parse_record, texts, whole

log = structlog.get_logger()

VERSION = 1
WRITTEN_EVERY_S = 3.0
"""At the latest, while copies are made or are expected."""
STALE_AFTER_S = 10.0
AGE_INTERVAL_S = 1.0


def activity_path(ur: str) -> str:
    return f"{own_path(ur)}/activity"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientActivity:
    """What the leader knows. ``copying_node_count``: nodes that copy now, and share what may be asked of a bookie."""

    active: frozenset[BookieId] = frozenset()
    quiet: frozenset[BookieId] = frozenset()
    copying_node_count: int = 1

    def of(self, bookie: BookieId) -> Activity:
        if bookie in self.active:
            return Activity.ACTIVE
        return Activity.QUIET if bookie in self.quiet else Activity.UNKNOWN

    def to_json(self) -> bytes:
        record = {
            "version": VERSION,
            "active": sorted(self.active),
            "quiet": sorted(self.quiet),
            "copying_nodes": self.copying_node_count,
        }
        return json.dumps(record).encode()

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Raises CorruptionError."""
        record: dict[str, Any] = parse_record(data)
        if record.get("version") != VERSION:
            raise CorruptionError("a record of a kind that this release does not know")
        return cls(
            active=frozenset(map(BookieId, texts(record, "active"))),
            quiet=frozenset(map(BookieId, texts(record, "quiet"))),
            copying_node_count=whole(record, "copying_nodes", least=1),
        )


async def read_activity(store: MetadataStore, ur: str, *, now_ms: int) -> ClientActivity | None:
    """Return what the leader says; None where it has said nothing lately, or nothing that can be read.

    ``now_ms``: by ZooKeeper's clock. Raises UnavailableError.
    """
    try:
        data, stat = await store.get(activity_path(ur))
        if now_ms - stat.mtime_ms > STALE_AFTER_S * 1_000:
            return None
        return ClientActivity.parse(data)
    except (NoNodeError, CorruptionError, UnauthorizedError):
        return None


class ActivitySource(Changing):
    """What the leader says, kept fresh by ``run``; ``current`` is None while it says nothing."""

    def __init__(self, store: MetadataStore, ur: str, clock: Clock) -> None:
        """``clock``: its wall clock is ZooKeeper's."""
        super().__init__()
        self._store, self._ur, self._clock = store, ur, clock
        self.current: ClientActivity | None = None
        self._read_s = 0.0

    async def run(self) -> None:
        """Raises SessionLostError."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow())
            tasks.create_task(self._age())

    async def _follow(self) -> None:
        async with aclosing(self._store.watch(activity_path(self._ur))) as events:
            async for _ in events:
                try:
                    found = await read_activity(self._store, self._ur, now_ms=self._clock.wall_ms())
                except SessionLostError:
                    raise
                except (
                    UnavailableError
                ) as error:  # it grows old, and the next event brings a newer one
                    log.debug("activity.unread", error=str(error))
                    continue
                self._read_s = self._clock.now_s()
                self._show(found)

    async def _age(self) -> None:
        while True:
            await self._clock.sleep(AGE_INTERVAL_S)
            if self._clock.now_s() - self._read_s > STALE_AFTER_S:
                self._show(None)

    def _show(self, found: ClientActivity | None) -> None:
        if found != self.current:
            self.current = found
            self._tell_change()
