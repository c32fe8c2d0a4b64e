"""The election, in the znodes that Java's AutoRecovery uses too."""

import asyncio

import pytest

from auditor.election import Election, Leader, Leadership, current_leader, in_order
from ledgers.errors import LeadershipLostError, SessionLostError
from ledgers.store import Create, SetData
from replication.nodes import Membership, Role
from replication.transactions import Batcher
from tests.memory.store import Fault, MemoryStore
from tests.replication.cluster import Cluster, fault_once
from tests.replication.nodes import PATHS, node_info
from tests.replication.overload import overload
from tests.replication.watched import settle
from tests.virtual_time import LoopClock

ELECTION = PATHS.election
LEADER = PATHS.pulsar_leader


class Candidate:
    """A session that is a candidate."""

    def __init__(self, store: MemoryStore, membership: Membership, name: str) -> None:
        self.store = store
        self.membership = membership
        self.election = Election(store, PATHS, membership, candidate=name, clock=LoopClock())
        self.winning = asyncio.create_task(self.election.win())

    @classmethod
    async def stand(cls, cluster: Cluster, name: str) -> "Candidate":
        store = MemoryStore(cluster.tree)
        membership = await Membership.join(store, PATHS, node_info(name, Role.AUDITOR))
        candidate = cls(store, membership, name)
        await settle()
        return candidate

    @property
    def has_won(self) -> bool:
        return self.winning.done()

    async def leadership(self) -> Leadership:
        return await asyncio.wait_for(asyncio.shield(self.winning), 1)

    async def end(self) -> None:
        self.winning.cancel()
        await asyncio.gather(self.winning, return_exceptions=True)
        await self.store.close()


async def test_the_first_vote_leads_and_names_its_node(cluster: Cluster) -> None:
    one = await Candidate.stand(cluster, "bookie-1:3181")
    two = await Candidate.stand(cluster, "bookie-2:3181")

    assert (one.has_won, two.has_won) == (True, False)
    vote = (await one.leadership()).vote_path
    assert vote == f"{ELECTION}/V_0000000000"
    assert (await cluster.store.get(vote))[0] == b'bookieId: "bookie-1:3181"\n'
    assert (await cluster.store.get(ELECTION))[0] == b'bookieId: "bookie-1:3181"\n'
    assert await current_leader(cluster.store, PATHS) == Leader(
        candidate="bookie-1:3181", session_id=one.store.session_id
    )
    await one.end()
    await two.end()


async def test_an_unreadable_vote_leads_all_the_same(cluster: Cluster) -> None:
    await cluster.store.create(f"{ELECTION}/V_0000000000", b"\xff", is_ephemeral=True)

    assert await current_leader(cluster.store, PATHS) == Leader(
        candidate=None, session_id=cluster.store.session_id
    )


@pytest.mark.parametrize("is_session_gone", [False, True], ids=["vote deleted", "session ended"])
async def test_rule_s9_only_a_node_that_leads_is_announced_as_leader(
    cluster: Cluster, is_session_gone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = MemoryStore(cluster.tree)
    membership = await Membership.join(store, PATHS, node_info("node-1", Role.AUDITOR))
    election = Election(store, PATHS, membership, candidate="node-1", clock=cluster.clock)

    async def go_meanwhile(vote_path: str) -> None:
        await cluster.store.delete(membership.path if is_session_gone else vote_path)

    monkeypatch.setattr(election, "_predecessor", go_meanwhile)
    with pytest.raises(SessionLostError if is_session_gone else LeadershipLostError):
        await election.win()
    assert (await cluster.store.get(ELECTION))[0] == b""


async def test_the_next_node_leads_when_the_leader_stops(cluster: Cluster) -> None:
    candidates = [await Candidate.stand(cluster, f"node-{i}") for i in range(3)]

    for number, candidate in enumerate(candidates):
        assert [c.has_won for c in candidates[number:]] == [
            i == 0 for i in range(len(candidates) - number)
        ]
        await candidate.end()
        await settle()

    assert await current_leader(cluster.store, PATHS) is None


async def test_a_candidate_that_gives_up_early_makes_no_leader(cluster: Cluster) -> None:
    one, two, three = [await Candidate.stand(cluster, f"node-{i}") for i in range(3)]

    await two.end()
    await settle()
    assert not three.has_won

    await one.end()
    await three.leadership()
    await three.end()


async def test_each_candidate_watches_only_the_vote_before_its_own(cluster: Cluster) -> None:
    candidates = [await Candidate.stand(cluster, f"node-{i}") for i in range(5)]
    before = [candidate.store.request_count for candidate in candidates]

    await candidates[0].end()
    await settle()

    after = [candidate.store.request_count for candidate in candidates]
    assert candidates[1].has_won
    assert [new - old for new, old in zip(after[2:], before[2:], strict=True)] == [0, 0, 0]
    for candidate in candidates[1:]:
        await candidate.end()


async def test_candidates_wait_for_a_java_node_that_leads(cluster: Cluster) -> None:
    java = MemoryStore(cluster.tree)
    await java.create(
        f"{ELECTION}/V_", b'bookieId: "java:3181"\n', is_ephemeral=True, is_sequential=True
    )
    ours = await Candidate.stand(cluster, "node-1")
    assert not ours.has_won

    await java.close()

    await ours.leadership()
    await ours.end()


# --- The election of Pulsar's metadata driver -----------------------------------------------------


async def pulsar_leads(cluster: Cluster) -> MemoryStore:
    """Return the session of an auditor of Pulsar's driver that leads."""
    pulsar = MemoryStore(cluster.tree)
    await pulsar.create(LEADER, b'"pulsar:3181"', is_ephemeral=True)
    return pulsar


@pytest.mark.parametrize("has_vote", [False, True], ids=["Pulsar's driver", "both elections"])
async def test_candidates_wait_for_an_auditor_of_pulsars_driver(has_vote: bool) -> None:
    cluster = await Cluster.start()
    pulsar = await pulsar_leads(cluster)
    java = MemoryStore(cluster.tree)
    if has_vote:
        await java.create(f"{ELECTION}/V_", is_ephemeral=True, is_sequential=True)
    ours = await Candidate.stand(cluster, "node-1")
    await java.close()
    await settle()
    assert not ours.has_won
    assert await current_leader(cluster.store, PATHS) == Leader(
        candidate="pulsar:3181", session_id=pulsar.session_id
    )

    await pulsar.close()

    await ours.leadership()
    assert await current_leader(cluster.store, PATHS) == Leader(
        candidate="node-1", session_id=ours.store.session_id
    )
    await ours.end()


async def test_pulsars_driver_finds_a_leader_with_another_bookie_id_than_its_own() -> None:
    """It would delete the znode of another session if the value was its own id."""
    cluster = await Cluster.start()
    ours = await Candidate.stand(cluster, "bookie-1:3181")

    data, stat = await cluster.store.get(LEADER)

    assert data == b'"bookmender-bookie-1:3181"'
    assert stat.ephemeral_owner == ours.store.session_id
    await ours.end()
    assert await cluster.store.exists(LEADER) is None


async def test_rule_s9_a_leader_whose_place_pulsars_driver_takes_writes_nothing() -> None:
    cluster = await Cluster.start()
    ours = await Candidate.stand(cluster, "node-1")
    leadership = await ours.leadership()
    lost = asyncio.create_task(ours.election.wait_lost(leadership))
    await settle()

    await cluster.store.delete(LEADER)
    pulsar = await pulsar_leads(cluster)

    with pytest.raises(LeadershipLostError):
        await Batcher(ours.store, leadership.guards).send([Create(path=f"{ELECTION}/written")])
    assert await cluster.store.exists(f"{ELECTION}/written") is None
    await asyncio.wait_for(lost, 1)
    await ours.end()
    await pulsar.close()


async def test_a_candidate_that_waits_for_pulsars_driver_learns_that_its_vote_is_deleted() -> None:
    cluster = await Cluster.start()
    pulsar = await pulsar_leads(cluster)
    ours = await Candidate.stand(cluster, "node-1")

    await cluster.store.delete(f"{ELECTION}/V_0000000000")

    with pytest.raises(LeadershipLostError):
        await ours.leadership()
    await ours.end()
    await pulsar.close()


@pytest.mark.parametrize("name", ["node-1", "node-2"], ids=["the same node again", "another node"])
async def test_a_successor_waits_for_the_end_of_a_leader_whose_vote_is_deleted(name: str) -> None:
    cluster = await Cluster.start()
    former = await Candidate.stand(cluster, "node-1")
    successor = await Candidate.stand(cluster, name)

    await cluster.store.delete((await former.leadership()).vote_path)
    await settle()
    assert not successor.has_won

    await former.end()
    await successor.leadership()
    await successor.end()


async def test_unknown_znodes_beside_the_votes_are_ignored(cluster: Cluster) -> None:
    for name in ("V_", "V_x", "vote", "W_0000000000"):
        await cluster.store.create(f"{ELECTION}/{name}")

    ours = await Candidate.stand(cluster, "node-1")

    await ours.leadership()
    await ours.end()


async def test_a_missing_election_znode_is_created(cluster: Cluster) -> None:
    await cluster.store.delete(ELECTION)

    ours = await Candidate.stand(cluster, "node-1")

    await ours.leadership()
    await ours.end()


@pytest.mark.compat("G1", verdict="better")
@pytest.mark.parametrize("is_expired", [False, True], ids=["deleted by hand", "session expired"])
async def test_rule_s9_a_leader_learns_that_its_vote_is_deleted(is_expired: bool) -> None:
    cluster = await Cluster.start()
    ours = await Candidate.stand(cluster, "node-1")
    leadership = await ours.leadership()
    lost = asyncio.create_task(ours.election.wait_lost(leadership))
    await settle()
    assert not lost.done()

    if is_expired:
        cluster.tree.expire(ours.store)
    else:
        await cluster.store.delete(leadership.vote_path)

    await asyncio.wait([lost], timeout=1)
    assert lost.done()
    if is_expired:
        assert lost.exception() is not None
    await ours.end()


@pytest.mark.compat(
    "G1", verdict="better", why="the leader watches its vote, and each write checks it"
)
async def test_g1_a_candidate_learns_at_once_that_its_vote_is_deleted(cluster: Cluster) -> None:
    one = await Candidate.stand(cluster, "node-1")
    two = await Candidate.stand(cluster, "node-2")

    await cluster.store.delete(f"{ELECTION}/V_0000000001")

    with pytest.raises(LeadershipLostError):
        await two.leadership()
    await one.leadership()
    for candidate in (one, two):
        await candidate.end()


async def test_a_waiting_candidate_learns_that_its_session_ended(cluster: Cluster) -> None:
    one = await Candidate.stand(cluster, "node-1")
    two = await Candidate.stand(cluster, "node-2")

    cluster.tree.expire(two.store)

    with pytest.raises(SessionLostError):
        await two.leadership()
    for candidate in (one, two):
        await candidate.end()


async def test_rule_s8_a_leader_with_an_unreadable_vote_keeps_leading(cluster: Cluster) -> None:
    ours = await Candidate.stand(cluster, "node-1")
    leadership = await ours.leadership()
    throttled = overload(ours.store, leadership.vote_path)
    lost = asyncio.create_task(ours.election.wait_lost(leadership))
    await asyncio.sleep(60)
    assert not lost.done()

    throttled.clear()
    await asyncio.sleep(60)
    assert not lost.done()

    await cluster.store.delete(leadership.vote_path)
    await asyncio.wait_for(lost, 1)
    await ours.end()


async def test_a_vote_deleted_while_it_was_unreadable_is_noticed(cluster: Cluster) -> None:
    ours = await Candidate.stand(cluster, "node-1")
    leadership = await ours.leadership()
    throttled = overload(ours.store, leadership.vote_path)
    lost = asyncio.create_task(ours.election.wait_lost(leadership))
    await settle()
    await cluster.store.delete(leadership.vote_path)
    await asyncio.sleep(60)

    throttled.clear()
    await asyncio.wait_for(lost, 60)
    await ours.end()


@pytest.mark.parametrize(
    "path", [f"{ELECTION}/V_0000000000", ELECTION], ids=["the vote before", "the list of votes"]
)
async def test_rule_s9_a_candidate_that_cannot_read_the_votes_waits(
    cluster: Cluster, path: str
) -> None:
    one = await Candidate.stand(cluster, "node-1")
    store = MemoryStore(cluster.tree)
    throttled = overload(store, path)
    membership = await Membership.join(store, PATHS, node_info("node-2", Role.AUDITOR))
    two = Candidate(store, membership, "node-2")
    await asyncio.sleep(60)
    assert not two.has_won

    await one.end()
    await asyncio.sleep(60)
    assert not two.winning.done(), "nothing is concluded from what cannot be read (rule S8)"

    throttled.clear()
    await asyncio.wait_for(asyncio.shield(two.winning), 60)
    await two.end()


async def test_rule_s9_a_lost_reply_to_taking_the_lead_is_made_up_for(cluster: Cluster) -> None:
    store = MemoryStore(cluster.tree)
    membership = await Membership.join(store, PATHS, node_info("node-1", Role.AUDITOR))
    fault_once(cluster, store, SetData, Fault.LOST_REPLY)
    ours = Candidate(store, membership, "node-1")

    await asyncio.wait_for(asyncio.shield(ours.winning), 60)
    assert (await cluster.store.get(ELECTION))[0] == b'bookieId: "node-1"\n'
    await ours.end()


def test_votes_are_ordered_by_number_not_by_text() -> None:
    names = ["V_10000000000", "V_0000000009", "V_9999999999", "other"]

    assert in_order(names) == ["V_0000000009", "V_9999999999", "V_10000000000"]
