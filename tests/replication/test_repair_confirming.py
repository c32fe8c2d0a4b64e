"""A repair reads targets, members and the metadata of a whole ledger again right before it
writes.
"""

import asyncio

import pytest

from ledgers.bookies import Transfer
from ledgers.model import BookieId
from ledgers.registration import BookieView
from ledgers.store import Stat
from replication.cluster import ClusterView, SeenAbsences
from replication.marks import MarkedLedger
from replication.repair import DONE, OutcomeKind
from replication.work_queue import QueuedLedger
from replication.znodes import Mark
from tests.replication.cluster import Cluster, shut_out
from tests.replication.ledger_values import B1, B2, B3, registered
from tests.replication.nodes import LEDGER, PATHS, ROOT, Node
from tests.replication.overload import overload
from tests.replication.repairs import lost_b2, once_copied, open_ledger, repair_with, touch


def is_blind(node: Node) -> None:
    """Let the node receive no events, like a process that continues after a suspension."""

    async def unread(read: object) -> bool:
        return True

    node.views._try = unread  # type: ignore[method-assign]


async def test_a_target_reformatted_during_our_suspension_is_not_named() -> None:
    cluster = await lost_b2()
    async with cluster.node() as node:

        async def reformat(transfer: Transfer) -> None:
            assert transfer.target is not None
            is_blind(node)
            await cluster.kill(transfer.target)
            await cluster.wipe(transfer.target)
            await cluster.revive(transfer.target)

        once_copied(cluster, reformat)

        outcome = await repair_with(node)

    assert outcome.kind is OutcomeKind.DONE
    await cluster.assert_whole()


@pytest.mark.parametrize("is_back", [True, False], ids=["reformatted", "stopped"])
async def test_a_holder_lost_during_our_suspension_is_noticed_before_the_mark_is_deleted(
    is_back: bool,
) -> None:
    """The mark does not name B1, and a leader may have handled the event already."""
    cluster = await lost_b2()
    async with cluster.node() as node:

        async def lose_holder(transfer: Transfer) -> None:
            is_blind(node)
            await cluster.kill(B1)
            if is_back:
                await cluster.wipe(B1)
                await cluster.revive(B1)

        once_copied(cluster, lose_holder)

        outcome = await repair_with(node)

    assert outcome.kind is OutcomeKind.DONE
    await cluster.assert_whole()


# --- Members --------------------------------------------------------------------------------------


async def marked_for_b3_which_is_back() -> Cluster:
    """Return a whole ledger on B1, B2 and B3. Its mark names B3, which was absent for a moment."""
    cluster = await Cluster.start()
    await cluster.write_ledger((B1, B2, B3))
    await cluster.kill(B3)
    await cluster.mark(B3)
    await cluster.revive(B3)
    return cluster


async def test_a_whole_ledger_stays_marked_if_its_bookie_is_lost_again() -> None:
    cluster = await marked_for_b3_which_is_back()
    async with cluster.node() as node:
        lease = await node.lease()
        finish, is_first = node.queue.complete, True

        async def go_first(*args: object, **options: object) -> bool:
            nonlocal is_first
            if is_first:
                is_first = False
                is_blind(node)
                await cluster.kill(B3)  # Java's auditor writes nothing: the mark names B3 already
            return await finish(*args, **options)  # type: ignore[arg-type]

        node.queue.complete = go_first  # type: ignore[method-assign]

        outcome = await node.repairer.repair(lease)

    assert outcome.kind is OutcomeKind.WAITING
    assert await cluster.marked() == [LEDGER]


async def test_a_ledger_written_after_its_check_is_checked_again() -> None:
    cluster = await marked_for_b3_which_is_back()
    async with cluster.node() as node:
        lease = await node.lease()
        finish, calls = node.queue.complete, 0

        async def touch_first(*args: object, **options: object) -> bool:
            nonlocal calls
            calls += 1
            if calls == 1:
                await touch(cluster)
            return await finish(*args, **options)  # type: ignore[arg-type]

        node.queue.complete = touch_first  # type: ignore[method-assign]

        outcome = await node.repairer.repair(lease)

    assert outcome.kind is DONE.kind
    assert calls == 2
    await cluster.assert_queue_empty()


@pytest.mark.parametrize("lost", [B2, B3], ids=["a repaired ledger", "a whole ledger"])
async def test_a_member_whose_registration_is_hidden_does_not_keep_the_mark(lost: BookieId) -> None:
    cluster = await lost_b2() if lost is B2 else await marked_for_b3_which_is_back()
    async with cluster.node() as node:
        shut_out(node.store, f"{ROOT}/available/{B1}")
        await node.views.refresh()

        outcome = await repair_with(node)

    assert outcome.kind is OutcomeKind.DONE
    await cluster.assert_whole()


# --- Marks for registered bookies -----------------------------------------------------------------


def queued(*replicas: BookieId, mzxid: int, is_loss: bool = True) -> QueuedLedger:
    mark = MarkedLedger(ledger_id=LEDGER, mark=Mark(replicas=replicas), czxid=1, mzxid=mzxid)
    return QueuedLedger(ledger_id=LEDGER, marks=(mark,), is_loss=is_loss)


@pytest.mark.parametrize(
    ("ledger", "registered", "missed"),
    [
        pytest.param(queued(B2, mzxid=50), {B2: 10}, {B2}, id="registered before the mark"),
        pytest.param(queued(B2, mzxid=50), {B2: 60}, set(), id="lost, and back since"),
        pytest.param(queued(B2, mzxid=50), {B2: 0}, {B2}, id="ACLs hide when it registered"),
        pytest.param(queued(mzxid=50), {B2: 10}, set(), id="the mark names no bookie"),
        pytest.param(
            queued(B2, mzxid=50, is_loss=False),
            {B2: 10},
            set(),
            id="marked in our private queue alone",
        ),
        pytest.param(queued(B2, B3, mzxid=50), {B2: 10, B3: 60}, {B2}, id="each by itself"),
    ],
)
def test_a_bookie_marked_while_registered_lacks_entries(
    ledger: QueuedLedger, registered: dict[BookieId, int], missed: set[BookieId]
) -> None:
    assert ledger.missed_while_registered(lambda b: registered.get(b, 99)) == missed


JAVAS_FINDING, LOSS = "a check found a gap between the ends", "the bookie was lost"


@pytest.mark.parametrize(
    ("mark", "restarts", "is_watched", "read_count"),
    [
        pytest.param(JAVAS_FINDING, 0, True, 201, id="registered since before the mark"),
        pytest.param(JAVAS_FINDING, 1, True, 201, id="restarted since"),
        pytest.param(LOSS, 0, True, 2, id="lost, and back since"),
        pytest.param(LOSS, 1, True, 2, id="and restarted since"),
        pytest.param(LOSS, 0, False, 201, id="nobody saw that it was lost"),
    ],
)
async def test_a_bookie_is_asked_for_its_ends_only_if_it_was_marked_while_absent(
    cluster: Cluster, mark: str, restarts: int, is_watched: bool, read_count: int
) -> None:
    await cluster.write_ledger((B1, B2, B3), last=200, write_quorum=3)
    asked: list[int] = []

    async def note(transfer: Transfer) -> None:
        asked.append(len(transfer.reads.get(B2, ())))

    async with cluster.node("before") as before:
        if mark is JAVAS_FINDING:
            cluster.bookie(B2).lose(LEDGER, 100)
            await cluster.mark(B2)
        else:
            await cluster.kill(B2)
            await before.views.wait_change(before.views.change_count, timeout_s=1)
            await cluster.mark(B2)
            await cluster.revive(B2)
        for _ in range(restarts):
            await asyncio.sleep(1)
            await cluster.kill(B2)
            await asyncio.sleep(1)
            await cluster.revive(B2)
        async with cluster.node("after") as after:
            cluster.bookies.before_transfer = note

            await repair_with(before if is_watched else after)

    assert asked[0] == read_count
    assert await cluster.marked() == []
    await cluster.assert_whole()


async def test_a_check_may_have_missed_a_bookie_registered_between_two_views(
    cluster: Cluster,
) -> None:
    await cluster.write_ledger((B1, B2, B3), last=200, write_quorum=3)
    cluster.bookie(B2).lose(LEDGER, 100)
    async with cluster.node() as node:
        await cluster.kill(B2)
        await asyncio.sleep(1)
        throttled = overload(node.store, f"{ROOT}/available")
        await cluster.revive(B2)
        await cluster.mark(B2)
        await cluster.kill(B2)
        await asyncio.sleep(5)
        throttled.clear()
        await asyncio.sleep(5)
        await cluster.revive(B2)
        await asyncio.sleep(1)

        await repair_with(node)

    assert await cluster.marked() == []
    await cluster.assert_whole()


async def test_a_bookie_that_may_have_been_missed_is_believed_in_a_recovery() -> None:
    """No node saw that B2 and B3 were lost, but nothing says that they lack entries."""
    cluster = await open_ledger()
    await cluster.kill(B2, B3)
    await cluster.mark(B2, B3)
    for bookie in (B2, B3):
        await cluster.revive(bookie)
    await cluster.kill(B1)

    async with cluster.node() as node:
        lease, grace = await node.first_try()
        await node.repairer.repair(lease, grace.sighting)

    assert (await cluster.metadata()).last_entry_id == 9


@pytest.mark.parametrize(
    ("from_zxid", "to_zxid", "was_absent"),
    [
        pytest.param(11, 11, True, id="marked during the absence"),
        pytest.param(11, 19, True, id="and written again during it"),
        pytest.param(9, 9, False, id="marked before the absence"),
        pytest.param(9, 15, False, id="marked before it, written during it"),
        pytest.param(11, 25, False, id="marked during it, written after it"),
        pytest.param(31, 31, True, id="marked during the next absence"),
        pytest.param(11, 31, False, id="registered in between"),
    ],
)
def test_an_absence_covers_a_mark_only_as_a_whole(
    from_zxid: int, to_zxid: int, was_absent: bool
) -> None:
    absences = SeenAbsences()
    for change_count, (b2_czxid, zxid) in enumerate([(0, 10), (20, 20), (0, 30), (40, 40)]):
        absences.note(view_of(b2_czxid, zxid=zxid, change_count=change_count), now_s=0)

    assert absences.was_absent(B2, from_zxid=from_zxid, to_zxid=to_zxid) is was_absent


@pytest.mark.parametrize(("change_count", "was_absent"), [(3, True), (4, False), (5, False)])
def test_an_absence_covers_no_mark_if_a_change_was_not_seen(
    change_count: int, was_absent: bool
) -> None:
    absences = SeenAbsences()
    absences.note(view_of(0, zxid=10, change_count=1), now_s=0)
    absences.note(view_of(0, zxid=10, change_count=1), now_s=0)
    absences.note(view_of(0, B3, zxid=20, change_count=2), now_s=0)
    absences.note(view_of(30, B3, zxid=30, change_count=change_count), now_s=0)

    assert absences.was_absent(B2, from_zxid=15, to_zxid=15) is was_absent


def view_of(b2_czxid: int, *others: BookieId, zxid: int, change_count: int) -> ClusterView:
    """Return a view in which B2 is registered at this czxid, 0: not at all. B1 and B2 have
    cookies."""
    czxids = dict.fromkeys((B1, *others), 1) | ({B2: b2_czxid} if b2_czxid else {})
    return ClusterView(
        bookies=BookieView(writable=registered(czxids), zxid=zxid, change_count=change_count),
        cookies=dict.fromkeys((B1, B2), Stat(version=0)),
    )


# --- A worker may read a mark before it learns of the change for which the mark was made ----------


def slow_to_see(node: Node, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Let reads of the list of bookies take a second, and count them."""
    registration, reads = node.views._registration, []
    read = registration.read

    async def late() -> BookieView:
        reads.append(asyncio.get_running_loop().time())
        await asyncio.sleep(1)
        return await read()

    monkeypatch.setattr(registration, "read", late)
    return reads


async def test_rule_s6_a_bookie_that_still_answers_may_be_unregistered(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut off from ZooKeeper it may be lost soon, and no auditor would mark the ledger again."""
    await cluster.write_ledger((B1, B2, B3))
    async with cluster.node() as node:
        slow_to_see(node, monkeypatch)
        await cluster.unregister(B2)
        await cluster.mark(B2)

        outcome = await repair_with(node)

    assert outcome.kind is OutcomeKind.DONE
    assert B2 not in (await cluster.metadata()).bookies


async def test_a_bookie_registered_as_before_needs_no_second_read(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    await cluster.write_ledger((B1, B2, B3))
    await cluster.mark(B2)
    async with cluster.node() as node:
        await asyncio.sleep(1)  # it reads the list when it begins
        reads = slow_to_see(node, monkeypatch)

        outcome = await repair_with(node)

    assert outcome.kind is OutcomeKind.DONE
    assert reads == []


@pytest.mark.parametrize("is_made_anew", [True, False])
async def test_the_verdict_uses_the_contents_of_a_recreated_mark(is_made_anew: bool) -> None:
    """The new mark has the version of the one that was read, but other contents."""
    cluster = await Cluster.start()
    await cluster.write_ledger((B1, B2, B3))
    finding = (
        b'{"version": 1, "check": "fsck", "bookies": ["%s", "%s"], "detail": "", "found_ms": 1}'
    )
    data = finding.replace(b"%s", B1.encode(), 1).replace(b"%s", B2.encode(), 1)
    await cluster.store.create(PATHS.finding(LEDGER), data, with_parents=True)
    await cluster.mark(B1)
    async with cluster.node() as node:
        queued = await node.queued()
        if is_made_anew:
            await cluster.store.delete(PATHS.mark(LEDGER))
            await cluster.mark(B2)
        lease = await node.queue.lease(queued)
        assert lease is not None

        assert await node.queue.found_bad(lease) == ({B1, B2} if is_made_anew else {B1})
