"""Leader election: the node with the smallest vote leads, as with Java's AutoRecovery, in the same
znodes.

Votes are ephemeral and sequential below ``<ur>/auditorelection``. Each node except the leader
watches the vote before its own, and its own. Leadership is proven, not remembered (rule S9): each
write of the leader is a multi that checks the vote and the session's znode. Source: BookKeeper's
ZkLedgerAuditorManager.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

import structlog

from ledgers.clock import Clock
from ledgers.errors import CorruptionError, LeadershipLostError, NoNodeError
from ledgers.store import ANY_VERSION, Check, EventKind, MetadataStore, MultiFailed, SetData
from ledgers.tasks import task_scope, until_answered
from replication import znodes
from replication.nodes import Membership
from replication.transactions import Batcher, Guard
from replication.znodes import ClusterPaths, ensure_znode

T = TypeVar("T")

log = structlog.get_logger()

VOTE_PREFIX = "V_"
_VOTE = re.compile(rf"{VOTE_PREFIX}[0-9]{{10,19}}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Leadership:
    """Proof of a won election: each write of the leader checks its ``guards``."""

    vote_path: str
    membership: Membership

    @property
    def guards(self) -> tuple[Guard, ...]:
        vote = Guard(check=Check(path=self.vote_path), error=LeadershipLostError)
        return (self.membership.guard, vote)


class Election:
    """The candidacy of one session. ``candidate``: content of the vote, a bookie id or a host
    name."""

    def __init__(
        self,
        store: MetadataStore,
        paths: ClusterPaths,
        membership: Membership,
        *,
        candidate: str,
        clock: Clock,
    ) -> None:
        self._store = store
        self._clock = clock
        self._election = paths.election
        self._membership = membership
        self._vote = znodes.vote_to_bytes(candidate)

    async def win(self) -> Leadership:
        """Create a vote, and return when it is the smallest. Raises LeadershipLostError if our vote
        disappears.

        A node without a vote could not take over when the leader goes. So the loss of its own vote
        is noticed at once, too.
        """
        await ensure_znode(self._store, self._election)
        vote_path = await self._store.create(
            f"{self._election}/{VOTE_PREFIX}", self._vote, is_ephemeral=True, is_sequential=True
        )
        log.info("election.entered", vote=vote_path)
        while (predecessor := await self._predecessor(vote_path)) is not None:
            await self._wait_either_gone(f"{self._election}/{predecessor}", vote_path)
        leadership = Leadership(vote_path=vote_path, membership=self._membership)
        await self._answered(lambda: self._announce(leadership))
        log.info("election.won", vote=vote_path)
        return leadership

    async def _announce(self, leadership: Leadership) -> None:
        """Write our vote to the election znode, for people, as Java does. A leader's write like any
        other (rule S9)."""
        write = SetData(path=self._election, data=self._vote, version=ANY_VERSION)
        try:
            await Batcher(self._store, leadership.guards).send([write])
        except MultiFailed as failure:
            raise failure.cause from failure

    async def wait_lost(self, leadership: Leadership) -> None:
        """Return when the vote is gone: deleted by hand, or with the session."""
        await self._wait_gone(leadership.vote_path)

    async def _predecessor(self, vote_path: str) -> str | None:
        """Return the vote right before ours; None if ours is the first."""
        votes = in_order(await self._answered(lambda: self._store.children(self._election)))
        own = vote_path.rpartition("/")[2]
        if own not in votes:
            raise LeadershipLostError("our vote was deleted", path=vote_path)
        position = votes.index(own)
        return votes[position - 1] if position else None

    async def _wait_either_gone(self, *paths: str) -> None:
        async with task_scope() as scope:
            waits = [scope.start(self._wait_gone(path)) for path in paths]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)

    async def _wait_gone(self, path: str) -> None:
        async with aclosing(self._store.watch(path)) as events:
            async for event in events:
                is_deleted = event.kind is EventKind.DELETED
                if is_deleted or await self._answered(lambda: self._store.exists(path)) is None:
                    return

    async def _answered(self, call: Callable[[], Awaitable[T]]) -> T:
        """Repeat ``call`` until it is answered: without a reply a vote is neither known to exist
        nor known to be gone (rule S8)."""
        return await until_answered(call, event="election.request_failed", clock=self._clock)


@dataclass(frozen=True, slots=True, kw_only=True)
class Leader:
    """The leading node. ``candidate``: content of its vote (a bookie id, or a host).
    ``session_id``: owner of the vote."""

    candidate: str | None
    """None if the vote cannot be parsed; its node leads all the same."""
    session_id: int


async def current_leader(store: MetadataStore, paths: ClusterPaths) -> Leader | None:
    """Return the holder of the smallest vote; None if there is no vote."""
    election = paths.election
    try:
        votes = in_order(await store.children(election))
        for vote in votes[:1]:
            data, stat = await store.get(f"{election}/{vote}")
            return Leader(candidate=_candidate(data), session_id=stat.ephemeral_owner)
    except NoNodeError:  # no election yet, or the leader has just gone
        pass
    return None


def _candidate(data: bytes) -> str | None:
    try:
        return znodes.parse_vote(data)
    except CorruptionError:
        return None


def in_order(names: Sequence[str]) -> list[str]:
    """Return the votes among the names, ordered by sequence number."""
    return sorted(filter(_VOTE.fullmatch, names), key=lambda name: int(name[len(VOTE_PREFIX) :]))
