"""Shares the budget of a run equally among its executors.

Each executor creates an ephemeral znode, ``<ur>/bookmender/fsck/executors/<run>.<uuid>``, and
writes nothing else. All executors watch the list. When one joins, leaves or dies, the others adjust
their shares within a second. The limit of reads in flight at a bookie counts the executors of all
runs and the nodes of the daemon. The nodes count the executors as well (rule S10).

The shares must not sum up to more than the budget. A joining executor waits until the others have
reduced theirs, unless there is enough for all. An executor that cannot reach ZooKeeper cannot see
the list, so it reads nothing. ``fixed_pace`` shares nothing: it is for an executor alone.
"""

import asyncio
import uuid
from collections.abc import Callable, Collection, Coroutine
from contextlib import aclosing, suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import structlog

from auditor.fsck.options import FsckOptions
from ledgers.bulk.limiters import READS_IN_FLIGHT_CEILING, reads_in_flight_max
from ledgers.clock import Clock, SystemClock
from ledgers.errors import BookmenderError, NodeExistsError, SessionLostError, UnavailableError
from ledgers.store import MetadataStore, SessionState, children_if_any
from ledgers.tasks import task_scope, until_answered
from replication.nodes import LiveNode, live_nodes, reader_count
from replication.znodes import ClusterPaths

log = structlog.get_logger()

LIST_INTERVAL_S = 0.2
"""Pause between two reads of the list of executors. If many join together, one read covers
several."""
SHRINK_WAIT_S = 1.0
"""Time for the other executors to reduce their shares after one joined: the delay of a watch and
one ``LIST_INTERVAL_S``."""
LEAVE_S = 2.0
"""Deadline for deleting our znode. Otherwise it ends with the session."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadShare:
    """The share of one executor: its rates for all bookies together, and its reads in flight at
    each bookie."""

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


Pace = Callable[[FsckOptions, MetadataStore, ClusterPaths, Apply], Coroutine[Any, Any, None]]
"""Supplies one executor's share. It receives the options, the session of this executor (which may
write), and the paths below ``underreplication``.

It calls ``apply`` with the first share as soon as there is one, and after every change, until
cancelled. Nothing is read before the first share. An error raised here ends the inspection, which
raises it again. On cancellation the share is given back."""


async def fixed_pace(
    options: FsckOptions, store: MetadataStore, paths: ClusterPaths, apply: Apply
) -> None:
    """Apply the limits of the options, regardless of other readers."""
    reads_in_flight = reads_in_flight_max(options.reads_in_flight_per_bookie, reader_count=1)
    apply(
        ReadShare(
            reads_per_s=options.reads_per_s,
            bytes_per_s=options.bytes_per_s,
            reads_in_flight_per_bookie=reads_in_flight,
        )
    )
    await asyncio.Event().wait()  # it never changes


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPace:
    """The ``Pace`` of each executor of one run. Can be pickled."""

    run: str
    """Name of the run, without dot and slash."""

    def __post_init__(self) -> None:
        assert self.run, self
        assert not {".", "/"}.intersection(self.run), self

    async def __call__(
        self, options: FsckOptions, store: MetadataStore, paths: ClusterPaths, apply: Apply
    ) -> None:
        name = f"{self.run}.{uuid.uuid4()}"
        await LeasedPace(options, store, paths, apply, name, SystemClock()).lease()


def share_of(
    options: FsckOptions, *, name: str, executors: Collection[str], node_reader_count: int
) -> ReadShare | None:
    """Return the share of the executor whose znode is ``name``. ``executors`` are the znodes of all
    runs, including this one.

    None if the run has more executors than reads or bytes per second, and this one gets nothing.
    ``node_reader_count``: the number of readers that do not belong to fsck.
    """
    assert name in executors, name
    run = name.partition(".")[0]
    siblings = sorted(each for each in executors if each.partition(".")[0] == run)
    place, count = siblings.index(name), len(siblings)
    limits = (options.reads_per_s, options.bytes_per_s)
    reads, size = (limit // count + (place < limit % count) for limit in limits)
    if (limits[0] and not reads) or (limits[1] and not size):  # 0 would be no limit
        return None
    return ReadShare(
        reads_per_s=reads,
        bytes_per_s=size,
        reads_in_flight_per_bookie=reads_in_flight_max(
            options.reads_in_flight_per_bookie, reader_count=node_reader_count + len(executors)
        ),
    )


def others_must_shrink(options: FsckOptions, *, reader_count: int) -> bool:
    """True if the others must reduce their shares before a joining executor, the last of
    ``reader_count`` readers, may read.

    False if the run has no rate limits, and all readers may have the set number of reads in flight.
    Each task is an executor, and many are short, so none should wait without need.
    """
    wanted = min(options.reads_in_flight_per_bookie, READS_IN_FLIGHT_CEILING)
    is_short = reads_in_flight_max(wanted, reader_count=reader_count) < wanted
    return bool(options.reads_per_s or options.bytes_per_s or is_short)


@dataclass
class LeasedPace:
    """The pace of one executor, whose znode exists while it runs."""

    options: FsckOptions
    store: MetadataStore
    paths: ClusterPaths
    apply: Apply
    name: str
    """The name of the executor's znode."""
    clock: Clock
    _nodes: dict[str, LiveNode | None] = field(default_factory=dict)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _break_count: int = 0
    """Number of connection losses to ZooKeeper. A list that was read before one is outdated after
    it."""

    async def lease(self) -> None:
        """Supply shares as ``Pace`` describes. Raises SessionLostError.

        1. Create the znode, so that the others see this executor and reduce their shares.
        2. If shares are limited, wait until they have done so. Reading at once would exceed the
           budget.
        3. Follow the list of executors until cancelled; then delete the znode.
        """
        await self._join()
        try:
            async with task_scope() as scope:
                for watched in (self.paths.fsck_executors, self.paths.nodes):
                    scope.start(self._watch(watched))
                scope.start(self._pause_while_suspended())
                executors, others = await self._readers()
                count = len({*executors, self.name}) + others
                if executors != [self.name] and others_must_shrink(
                    self.options, reader_count=count
                ):
                    await self.clock.sleep(SHRINK_WAIT_S)
                await self._follow()
        finally:
            with suppress(BookmenderError, TimeoutError):
                async with asyncio.timeout(LEAVE_S):
                    await self.store.delete(self._path)

    async def _follow(self) -> None:
        """Apply the share, and compute it again after every change.

        The event is cleared before the list is read, so that a change during the read leads to
        another round. The share is not applied if the connection broke meanwhile: the list may be
        outdated, and ``_pause_while_suspended`` has applied None. It sets the event when the
        connection is back.
        """
        logged: ReadShare | None = None
        while True:
            self._changed.clear()
            break_count = self._break_count
            executors, others = await self._readers()
            share = None
            if self.name in executors:
                share = share_of(
                    self.options, name=self.name, executors=executors, node_reader_count=others
                )
            if break_count == self._break_count and self.store.state is SessionState.CONNECTED:
                self.apply(share)
                if share != logged:
                    log.info(
                        "fsck_share.changed",
                        **(asdict(share) if share else {"reads_in_flight_per_bookie": 0}),
                    )
                logged = share
            await self.clock.sleep(LIST_INTERVAL_S)
            await self._changed.wait()

    async def _readers(self) -> tuple[list[str], int]:
        """Return the znodes of all executors, and the number of other readers. While ZooKeeper does
        not answer, nothing is read and the call is repeated.

        If our znode is missing, create it again. The next call comes ``LIST_INTERVAL_S`` later, so
        that the others can reduce their shares.
        """

        async def read() -> tuple[list[str], int]:
            try:
                executors = await children_if_any(self.store, self.paths.fsck_executors)
                if self.name not in executors:  # an operator deleted it, or the session is over
                    log.warning("fsck_share.deleted", path=self._path)
                    await self._join()
                    self._changed.set()  # read the list again after ``LIST_INTERVAL_S``
                nodes = await live_nodes(self.store, self.paths, self._nodes)
                return executors, reader_count(nodes, executor_count=0)
            except (UnavailableError, SessionLostError):
                self.apply(None)
                raise

        return await until_answered(read, event="fsck_share.read_failed", clock=self.clock)

    async def _watch(self, path: str) -> None:
        async with aclosing(self.store.watch(path)) as events:
            async for _ in events:
                self._changed.set()

    async def _pause_while_suspended(self) -> None:
        """Stop all reads while the connection to ZooKeeper is broken."""
        while True:
            await self.store.wait_disconnected()
            self._break_count += 1
            self.apply(None)
            log.warning("fsck_share.paused", reason="ZooKeeper is out of reach")
            await self.store.wait_connected()
            self._changed.set()

    @property
    def _path(self) -> str:
        return f"{self.paths.fsck_executors}/{self.name}"

    async def _join(self) -> None:
        """Create our znode. Raises SessionLostError."""
        with suppress(NodeExistsError):
            await self.store.create(self._path, is_ephemeral=True, with_parents=True)
