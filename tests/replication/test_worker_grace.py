"""Notes of a ledger that waits for its grace under a worker's lock, and what ends the grace
early."""

import asyncio

import pytest

from ledgers.errors import FencedError
from ledgers.model import BookieId, LedgerState
from ledgers.registration import BookieView, RegisteredBookie
from replication.cluster import ClusterView
from replication.ledger_record import WaitingNote
from replication.open_ledgers import WriterSighting, is_overtaken
from replication.orders import DrainOrder, Orders, drain_znode
from replication.reasons import Exclusion, Reason
from replication.settings import ReplicationSettings
from tests.memory.bookies import Fault, Op
from tests.replication.cluster import Cluster, queue_empty, until
from tests.replication.ledger_values import B1, B2, B3, B4
from tests.replication.nodes import LEDGER, PATHS, Node, working
from tests.replication.repairs import THREE, drain, open_ledger, watch_fencing
from tests.replication.test_open_ledgers import SEGMENT

SETTINGS = ReplicationSettings()


async def unprovable_ledger() -> Cluster:
    """Return a ledger of which one bookie is lost for ever and one returned reformatted."""
    cluster = await open_ledger()
    cluster.put(LEDGER, 10, B1, B2)
    await cluster.kill(B2)
    await cluster.wipe(B2)
    await cluster.revive(B2)
    await cluster.kill(B1)
    return cluster


async def noted(node: Node) -> WaitingNote:
    note = await node.notes.read(LEDGER)
    assert note is not None
    return note


async def notes_over(node: Node, span_s: int) -> list[WaitingNote]:
    """Return the notes at the end of each second."""
    found = []
    for _ in range(span_s):
        await asyncio.sleep(1)
        found.append(await noted(node))
    return found


async def is_told(node: Node, reason: Reason) -> bool:
    note = await node.notes.read(LEDGER)
    return note is not None and note.reason is reason


# --- An end that cannot be proven -----------------------------------------------------------------


async def test_an_unprovable_end_stays_noted_while_it_is_tried_again() -> None:
    cluster = await unprovable_ledger()

    async with cluster.node() as node, working(node):
        before = await notes_over(node, int(SETTINGS.open_ledger_grace_s) - 1)
        await asyncio.sleep(2)
        after = await notes_over(node, 400)

    assert {note.reason for note in before} == {Reason.OPEN_LEDGER_GRACE}
    assert {note.reason for note in after} == {Reason.END_UNPROVEN}
    assert len({note.since_ms for note in after}) == 1
    assert after[-1].tries > after[0].tries, "it is tried nonetheless"
    assert after[0].blocked.facts.unresponsive == (B1,)
    assert after[0].blocked.facts.needed == ()


async def test_the_note_names_bookies_without_which_it_cannot_close() -> None:
    """B2 returned empty, B1 is absent, B3 hangs: the last entries are unknown."""
    cluster = await unprovable_ledger()
    cluster.bookie(B3).is_down = True

    async with cluster.node() as node, working(node):
        await asyncio.sleep(SETTINGS.open_ledger_grace_s + 60)
        note = await noted(node)

    assert note.reason is Reason.END_UNPROVEN
    assert note.blocked.facts.needed == (B1, B3)


async def test_once_its_bookies_are_back_the_ledger_is_closed() -> None:
    cluster = await unprovable_ledger()

    async with cluster.node() as node, working(node):
        await asyncio.sleep(SETTINGS.open_ledger_grace_s + 1)
        assert (await noted(node)).reason is Reason.END_UNPROVEN
        await cluster.revive(B1)
        await until(cluster, lambda: queue_empty(cluster))

    metadata = await cluster.metadata()
    assert (metadata.is_closed, metadata.last_entry_id) == (True, 10)


async def test_too_many_lost_bookies_are_noted_until_one_returns() -> None:
    cluster = await open_ledger()
    await cluster.kill(B2, B3)

    async with cluster.node() as node, working(node):
        await asyncio.sleep(SETTINGS.open_ledger_grace_s + 1)
        told = await notes_over(node, 400)
        await cluster.revive(B3)
        async with asyncio.timeout(SETTINGS.open_ledger_grace_s + 5):
            await until(cluster, lambda: queue_empty(cluster))

    assert {note.reason for note in told} == {Reason.NO_COVERAGE}
    assert told[-1].blocked.facts.absent == (B2, B3)
    assert (await cluster.metadata()).last_entry_id == 9


# --- A known end without targets ------------------------------------------------------------------


async def open_ledger_without_spare(*, is_away: bool) -> Cluster:
    """Return a ledger whose entries must be on all three bookies. One is absent or refuses adds,
    and there is no fourth."""
    cluster = await Cluster.start(*THREE)
    await cluster.write_ledger(THREE, write_quorum=3, ack_quorum=3, state=LedgerState.OPEN)
    await cluster.mark(B3)
    if is_away:
        await cluster.kill(B3)
    else:
        await drain(cluster, B3, may_fence=True)
        cluster.bookies.fail(B3, Op.ADD, Fault(error=FencedError))
    return cluster


@pytest.mark.parametrize(
    ("is_away", "excluded", "absent"),
    [
        pytest.param(
            True,
            ((Exclusion.MEMBER, 2),),
            (B3,),
            id="one is absent",
        ),
        pytest.param(
            False,
            ((Exclusion.MEMBER, 2), (Exclusion.DRAINING, 1)),
            (),
            id="one refuses",
        ),
    ],
)
async def test_missing_targets_are_noted_until_one_appears(
    is_away: bool, excluded: tuple[tuple[Exclusion, int], ...], absent: tuple[BookieId, ...]
) -> None:
    """The note names the rule."""
    cluster = await open_ledger_without_spare(is_away=is_away)

    async with cluster.node() as node, working(node):
        await asyncio.sleep(SETTINGS.open_ledger_grace_s + 1)
        told = await notes_over(node, 400)
        cluster.bookie(B4).start()
        await cluster.register(B4)
        async with asyncio.timeout(SETTINGS.open_ledger_grace_s + 5):
            await until(cluster, lambda: queue_empty(cluster))

    assert {note.reason for note in told} == {Reason.NO_TARGET}
    assert told[-1].tries > 1, "it is tried nonetheless"
    facts = told[-1].blocked.facts
    assert f"{B3}: " in facts.errors[0]
    assert (facts.ack_quorum, facts.excluded, facts.absent) == (3, excluded, absent)
    assert (await cluster.metadata()).last_entry_id == 9


# --- Until when -----------------------------------------------------------------------------------


async def test_the_end_of_the_grace_is_noted_and_binds_no_node() -> None:
    cluster = await open_ledger()
    await cluster.kill(B2)

    async with cluster.node() as node, working(node):
        began_ms = cluster.clock.wall_ms()
        await asyncio.sleep(5)
        note = await noted(node)

    assert note.reason is Reason.OPEN_LEDGER_GRACE
    grace_ms = int(SETTINGS.open_ledger_grace_s * 1000)
    assert 0 <= note.grace_until_ms - began_ms - grace_ms < 1_000
    assert note.fingerprint is not None
    assert note.wait_ms(now_ms=began_ms, fingerprint=note.fingerprint) == 0, "should its node die"


# --- Orders that change meanwhile -----------------------------------------------------------------


async def test_a_cancelled_drain_ends_the_wait_of_its_ledgers() -> None:
    cluster = await open_ledger()
    fenced = watch_fencing(cluster)
    await drain(cluster, B2, may_fence=True)

    async with cluster.node() as node, working(node):
        await asyncio.sleep(5)
        assert (await noted(node)).blocked.facts.draining == (B2,)
        await cluster.store.delete(drain_znode(PATHS, B2).path)
        took_s = await until(cluster, lambda: queue_empty(cluster))
        await asyncio.sleep(1)

        assert await node.notes.ledger_ids() == set()

    assert took_s < 2
    assert fenced == []
    assert (await cluster.metadata()).state is LedgerState.OPEN


async def test_an_absent_bookie_besides_the_drain_starts_its_own_grace() -> None:
    cluster = await open_ledger()
    fenced = watch_fencing(cluster)
    await drain(cluster, B2, may_fence=True)
    await cluster.kill(B3)

    async with cluster.node() as node, working(node):
        await asyncio.sleep(5)
        await cluster.store.delete(drain_znode(PATHS, B2).path)
        await asyncio.sleep(SETTINGS.open_ledger_grace_s - 2)

        assert B2 not in (await noted(node)).blocked.facts.draining
        assert fenced == []
        await until(cluster, lambda: queue_empty(cluster))

    assert (await cluster.metadata()).is_closed


DRAINING = WriterSighting(segment=SEGMENT, last_entries={}, draining=(B1, B2))
ABSENT = WriterSighting(segment=SEGMENT, last_entries={B1: 3, B2: 3})
LACKING = WriterSighting(segment=SEGMENT, last_entries={B1: 3}, lacking=(B1,), first_lacking=4)
FENCING = DrainOrder(since_ms=1, may_fence=True)


@pytest.mark.parametrize(
    ("sighting", "orders", "there", "is_over"),
    [
        pytest.param(DRAINING, {B1: FENCING, B2: FENCING}, [B1, B2], False, id="as it was"),
        pytest.param(DRAINING, {B1: FENCING}, [B1, B2], True, id="one is no longer draining"),
        pytest.param(
            DRAINING,
            {B1: FENCING, B2: DrainOrder(since_ms=1)},
            [B1, B2],
            True,
            id="nothing is to be fenced for it any more",
        ),
        pytest.param(ABSENT, {}, [B3], False, id="no order was its reason, and they are absent"),
        pytest.param(ABSENT, {}, [B1, B3], False, id="one of them is back"),
        pytest.param(ABSENT, {}, [B1, B2, B3], True, id="both are back"),
        pytest.param(LACKING, {}, [B1, B2], False, id="it was there all along, and lacks entries"),
    ],
)
def test_a_grace_ends_with_its_reason(
    sighting: WriterSighting,
    orders: dict[BookieId, DrainOrder],
    there: list[BookieId],
    is_over: bool,
) -> None:
    bookies = {
        b: RegisteredBookie(bookie_id=b, address=None, czxid=1, is_writable=True) for b in there
    }
    view = ClusterView(bookies=BookieView(writable=bookies), orders=Orders(draining=orders))

    assert is_overtaken(sighting, view) is is_over


async def test_once_its_bookies_are_back_a_ledger_waits_no_longer() -> None:
    cluster = await open_ledger()
    await cluster.kill(B2, B3)

    async with cluster.node() as node, working(node):
        await until(cluster, lambda: is_told(node, Reason.NO_COVERAGE))
        await asyncio.sleep(2 * SETTINGS.retry_min_s)
        assert (await noted(node)).grace_until_ms, "its next grace has begun"
        await cluster.revive(B2)
        await cluster.revive(B3)
        took_s = await until(cluster, lambda: queue_empty(cluster))

    assert took_s < 2
    assert (await cluster.metadata()).is_closed


async def test_the_grace_continues_if_only_one_bookie_is_back() -> None:
    cluster = await open_ledger()
    fenced = watch_fencing(cluster)
    await cluster.kill(B2, B3)

    async with cluster.node() as node, working(node):
        await asyncio.sleep(SETTINGS.open_ledger_grace_s - 10)
        await cluster.revive(B3)
        await asyncio.sleep(8)
        assert fenced == []
        await asyncio.sleep(4)

    assert fenced
