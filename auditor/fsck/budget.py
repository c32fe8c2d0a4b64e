"""A run's budget, shared by its executors however many there are: each takes the same part of it.

An executor is an ephemeral znode, ``<ur>/bookmender/fsck/executors/<run>.<uuid>``, and that is all
it writes. All watch the list: when one joins, or leaves, or dies, the others' parts change within a
second. What a bookie may be asked at a time counts the executors of all runs, and the nodes of the
daemon, who count them as well (rule S10).

The parts never sum up to more than the whole: who joins waits until the others have made room,
unless there is enough for all as it is, and who cannot see the list, as ZooKeeper is out of reach,
reads nothing.
"""

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Collection
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import TypeVar

import structlog

from auditor.fsck.levels import FsckOptions
from auditor.fsck.pace import Apply, ReadShare
from ledgers.answers import until_answered
from ledgers.bookie.budget import READS_IN_FLIGHT_CEILING, reads_in_flight_max
from ledgers.clock import Clock, SystemClock
from ledgers.errors import (
    BookmenderError,
    NodeExistsError,
    SessionLostError,
    UnavailableError,
)
from ledgers.operations.tasks import task_scope
from ledgers.store import MetadataStore, SessionState, children_if_any
from replication.cluster.membership import LiveNode, live_nodes, reader_count
from replication.cluster.own_state import fsck_executors_path, nodes_path

T = TypeVar("T")

log = structlog.get_logger()

LULL_S = 0.2
"""Between two looks at who is there: of many that come together each is not told of every other."""
ROOM_S = 1.0
"""That others have to make room for one that joins: a watch's way, and a lull."""
LEAVE_S = 2.0
"""That giving back may take; else the session's end does it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPace:
    """Begins the pace of each executor of one run; can be pickled. To be given as
    ``begin_pace``."""

    run: str
    """Its name, without a dot in it."""

    def __post_init__(self) -> None:
        assert self.run, self
        assert not {".", "/"}.intersection(self.run), self

    def __call__(self, options: FsckOptions, store: MetadataStore, ur: str) -> "LeasedPace":
        return LeasedPace(options, store, ur, run=self.run, clock=SystemClock())


def share_of(
    options: FsckOptions, *, name: str, executors: Collection[str], node_reader_count: int
) -> ReadShare | None:
    """The part of the executor called ``name`` (its znode), which is one of ``executors``, those of
    all runs.

    None: there is less to read in a second than executors, and others are served.
    ``node_reader_count``: the readers that are none of fsck's.
    """
    assert name in executors, name
    siblings = sorted(each for each in executors if run_of(each) == run_of(name))
    place = siblings.index(name)
    reads, size = (
        _part(total, place, len(siblings)) for total in (options.reads_per_s, options.bytes_per_s)
    )
    if reads is None or size is None:
        return None
    return ReadShare(
        reads_per_s=reads,
        bytes_per_s=size,
        reads_in_flight_per_bookie=reads_in_flight_max(
            options.reads_in_flight_per_bookie,
            reader_count=node_reader_count + len(executors),
        ),
    )


def takes_from_others(options: FsckOptions, *, reader_count: int) -> bool:
    """Whether an executor that joins, and makes them so many readers, has its part from what the
    others had.

    Not where a run is not limited and all may ask a bookie for as much as they are set to. Every
    task is an executor, many are short, and none is to wait in vain.
    """
    wanted = min(options.reads_in_flight_per_bookie, READS_IN_FLIGHT_CEILING)
    is_short = reads_in_flight_max(wanted, reader_count=reader_count) < wanted
    return bool(options.reads_per_s or options.bytes_per_s or is_short)


def _part(total: int, place: int, count: int) -> int | None:
    """None: nothing. 0: no limit, as it stands in settings."""
    if total == 0:
        return 0
    part = total // count + (place < total % count)
    return part or None


def run_of(name: str) -> str:
    """The run that a znode below ``executors`` belongs to."""
    return name.partition(".")[0]


class LeasedPace:
    """Of one executor: joined, while it runs."""

    def __init__(
        self, options: FsckOptions, store: MetadataStore, ur: str, *, run: str, clock: Clock
    ) -> None:
        self._options = options
        self._store, self._ur, self._clock = store, ur, clock
        self._name = f"{run}.{uuid.uuid4()}"
        self._path = f"{fsck_executors_path(ur)}/{self._name}"
        self._nodes: dict[str, LiveNode | None] = {}
        self._changed = asyncio.Event()
        self._break_count = 0
        """How often ZooKeeper was out of reach: what was read before says nothing of after."""

    async def run(self, apply: Apply) -> None:
        """As ``ReadPace`` says. Raises SessionLostError."""
        await self._join()
        try:
            async with task_scope() as scope:
                for watched in (fsck_executors_path(self._ur), nodes_path(self._ur)):
                    scope.start(self._watch(watched))
                scope.start(self._pause_while_suspended(apply))
                if await self._seen(self._takes_from_others, apply):
                    await self._clock.sleep(ROOM_S)
                await self._follow(apply)
        finally:
            await self._leave()

    async def _follow(self, apply: Apply) -> None:
        told: ReadShare | None = None
        while True:
            self._changed.clear()
            break_count = self._break_count
            share = await self._seen(self._share, apply)
            if break_count == self._break_count and self._store.state is SessionState.CONNECTED:
                apply(share)
                if share != told:
                    log.info("fsck_share.changed", **_fields(share))
                told = share
            await self._clock.sleep(LULL_S)
            await self._changed.wait()

    async def _seen(self, look: Callable[[], Awaitable[T]], apply: Apply) -> T:
        """What a look at the others shows, once they can be seen; until then nothing is read."""

        async def looking() -> T:
            try:
                return await look()
            except (UnavailableError, SessionLostError):
                apply(None)
                raise

        return await until_answered(looking, event="fsck_share.unknown", clock=self._clock)

    async def _takes_from_others(self) -> bool:
        count = len(await self._executors())
        reader_count = count + await self._node_reader_count()
        return count > 1 and takes_from_others(self._options, reader_count=reader_count)

    async def _share(self) -> ReadShare | None:
        executors = await self._executors()
        if self._name not in executors:  # deleted by an operator's hand, or the session is over
            log.warning("fsck_share.deleted", path=self._path)
            await self._join()
            self._changed.set()  # the others have to make room first
            return None
        return share_of(
            self._options,
            name=self._name,
            executors=executors,
            node_reader_count=await self._node_reader_count(),
        )

    async def _node_reader_count(self) -> int:
        nodes = await live_nodes(self._store, self._ur, self._nodes)
        return reader_count(nodes, executor_count=0)

    async def _executors(self) -> list[str]:
        return await children_if_any(self._store, fsck_executors_path(self._ur))

    async def _watch(self, path: str) -> None:
        async with aclosing(self._store.watch(path)) as events:
            async for _ in events:
                self._changed.set()

    async def _pause_while_suspended(self, apply: Apply) -> None:
        while True:
            await self._store.wait_disconnected()
            self._break_count += 1
            apply(None)
            log.warning("fsck_share.paused", reason="ZooKeeper is out of reach")
            await self._store.wait_connected()
            self._changed.set()

    async def _join(self) -> None:
        """Raises SessionLostError."""
        with suppress(NodeExistsError):
            await self._store.create(self._path, is_ephemeral=True, with_parents=True)

    async def _leave(self) -> None:
        with suppress(BookmenderError, TimeoutError):
            async with asyncio.timeout(LEAVE_S):
                await self._store.delete(self._path)


def _fields(share: ReadShare | None) -> dict[str, int]:
    if share is None:
        return {"reads_per_s": 0, "reads_in_flight_per_bookie": 0}
    return {
        "reads_per_s": share.reads_per_s,
        "bytes_per_s": share.bytes_per_s,
        "reads_in_flight_per_bookie": share.reads_in_flight_per_bookie,
    }
