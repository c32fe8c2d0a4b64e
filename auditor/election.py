"""Leader election: the node with the smallest vote leads, as with Java's AutoRecovery, in the same
znodes.

Votes are ephemeral and sequential below ``<ur>/auditorelection``. Each node except the leader
watches the vote before its own, and its own. Source: BookKeeper's ZkLedgerAuditorManager.

Pulsar's metadata driver has another election: the node that creates the ephemeral znode
``<ur>/leader`` leads (PulsarLedgerAuditorManager). Bookies of any cluster may be switched to that
driver at any time. So the node with the smallest vote also creates ``leader``, and leads only while
it holds both. It waits while an auditor of Pulsar's driver holds ``leader``, and such auditors wait
for it.

Leadership is proven, not remembered (rule S9): each write of the leader is a multi that checks the
session's znode, the vote and ``leader``. Pulsar's ``leader`` has version 0. Ours has version 1, so
that the check fails on Pulsar's.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import KW_ONLY, dataclass
from typing import TypeVar

import structlog

from ledgers.clock import Clock
from ledgers.errors import (
    CorruptionError,
    LeadershipLostError,
    NodeExistsError,
    NoNodeError,
    UnauthorizedError,
)
from ledgers.store import (
    ANY_VERSION,
    Check,
    Create,
    EventKind,
    MetadataStore,
    MultiFailed,
    Operation,
    SetData,
)
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
    leader_path: str
    """Our znode in the election of Pulsar's driver."""
    membership: Membership

    @property
    def guards(self) -> tuple[Guard, ...]:
        return (
            *self.candidacy,
            Guard(check=Check(path=self.leader_path, version=1), error=LeadershipLostError),
        )

    @property
    def candidacy(self) -> tuple[Guard, ...]:
        """Guards of the transaction that creates ``leader_path``: session and vote."""
        vote = Guard(check=Check(path=self.vote_path), error=LeadershipLostError)
        return (self.membership.guard, vote)


@dataclass
class Election:
    """The candidacy of one session. ``candidate``: content of the vote, a bookie id or a host."""

    store: MetadataStore
    paths: ClusterPaths
    membership: Membership
    _: KW_ONLY
    candidate: str
    clock: Clock

    def __post_init__(self) -> None:
        self._election, self._leader = self.paths.election, self.paths.pulsar_leader
        self._vote = znodes.vote_to_bytes(self.candidate)

    async def win(self) -> Leadership:
        """Create a vote, and return when it is the smallest and ``leader`` is ours. Raises
        LeadershipLostError if our vote disappears.

        A node without a vote could not take over when the leader goes. So the loss of its own vote
        is noticed at once, too.
        """
        await ensure_znode(self.store, self._election)
        vote_path = await self.store.create(
            f"{self._election}/{VOTE_PREFIX}", self._vote, is_ephemeral=True, is_sequential=True
        )
        log.info("election.entered", vote=vote_path)
        while (predecessor := await self._predecessor(vote_path)) is not None:
            await self._wait_either_gone(f"{self._election}/{predecessor}", vote_path)
        leadership = Leadership(
            vote_path=vote_path, leader_path=self._leader, membership=self.membership
        )
        while not await self._answered(lambda: self._take_lead(leadership)):
            await self._wait_either_gone(self._leader, vote_path)
        log.info("election.won", vote=vote_path)
        return leadership

    async def _take_lead(self, leadership: Leadership) -> bool:
        """Create ``leader`` at version 1, and write our vote to the election znode, for people, as
        Java does. Return False if another session holds ``leader``. A leader's write like any other
        (rule S9)."""
        data = znodes.pulsar_leader_to_bytes(self.candidate)
        lead: list[Operation] = [
            Create(path=self._leader, data=data, is_ephemeral=True),
            SetData(path=self._leader, data=data, version=0),
            SetData(path=self._election, data=self._vote, version=ANY_VERSION),
        ]
        try:
            await Batcher(self.store, leadership.candidacy).send(lead)
        except MultiFailed as failure:
            if not isinstance(failure.cause, NodeExistsError):
                raise failure.cause from failure
        else:
            return True
        with suppress(NoNodeError, UnauthorizedError):
            data, held = await self.store.get(self._leader)
            if held.ephemeral_owner == self.store.session_id:
                return True  # the reply to an earlier attempt was lost
            if not znodes.is_our_leader(data):
                log.warning(
                    "election.held_by_pulsar",
                    path=self._leader,
                    leader=_candidate(znodes.parse_pulsar_leader, data),
                    next_step="stop the AutoRecovery of Pulsar's metadata driver to let this node "
                    "lead. If none runs, delete the znode",
                )
        return False

    async def wait_lost(self, leadership: Leadership) -> None:
        """Return when our vote or ``leader`` is gone: deleted by hand, or with the session."""
        await self._wait_either_gone(
            leadership.vote_path, self._leader, owner=self.store.session_id
        )

    async def _predecessor(self, vote_path: str) -> str | None:
        """Return the vote right before ours; None if ours is the first."""
        votes = in_order(await self._answered(lambda: self.store.children(self._election)))
        own = vote_path.rpartition("/")[2]
        if own not in votes:
            raise LeadershipLostError("our vote was deleted", path=vote_path)
        position = votes.index(own)
        return votes[position - 1] if position else None

    async def _wait_either_gone(self, *paths: str, owner: int | None = None) -> None:
        async with task_scope() as scope:
            waits = [scope.start(self._wait_gone(path, owner)) for path in paths]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)

    async def _wait_gone(self, path: str, owner: int | None) -> None:
        """Return when the znode is gone, or belongs to another session than ``owner``."""
        async with aclosing(self.store.watch(path)) as events:
            async for event in events:
                if event.kind is EventKind.DELETED:
                    return
                stat = await self._answered(lambda: self.store.exists(path))
                if stat is None or owner not in (None, stat.ephemeral_owner):
                    return

    async def _answered(self, call: Callable[[], Awaitable[T]]) -> T:
        """Repeat ``call`` until it is answered: without a reply a vote is neither known to exist
        nor known to be gone (rule S8)."""
        return await until_answered(call, event="election.request_failed", clock=self.clock)


@dataclass(frozen=True, slots=True, kw_only=True)
class Leader:
    """The leading node. ``candidate``: content of its znode (a bookie id, or a host).
    ``session_id``: owner of the znode."""

    candidate: str | None
    """None if the znode cannot be parsed; its node leads all the same."""
    session_id: int


async def current_leader(store: MetadataStore, paths: ClusterPaths) -> Leader | None:
    """Return the holder of ``leader``, or else of the smallest vote; None if there is neither.

    Java's nodes without Pulsar's driver, and bookmender's of earlier releases, have only a vote.
    """
    with suppress(NoNodeError):  # no election yet, or the leader has just gone
        data, stat = await store.get(paths.pulsar_leader)
        return Leader(
            candidate=_candidate(znodes.parse_pulsar_leader, data), session_id=stat.ephemeral_owner
        )
    election = paths.election
    with suppress(NoNodeError):
        for vote in in_order(await store.children(election))[:1]:
            data, stat = await store.get(f"{election}/{vote}")
            return Leader(
                candidate=_candidate(znodes.parse_vote, data), session_id=stat.ephemeral_owner
            )
    return None


def _candidate(parse: Callable[[bytes], str | None], data: bytes) -> str | None:
    try:
        return parse(data)
    except CorruptionError:
        return None


def in_order(names: Sequence[str]) -> list[str]:
    """Return the votes among the names, ordered by sequence number."""
    return sorted(filter(_VOTE.fullmatch, names), key=lambda name: int(name[len(VOTE_PREFIX) :]))
