"""The view of the bookies as it follows ZooKeeper."""

import asyncio
import functools
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping

import pytest
from structlog.testing import capture_logs

from ledgers.codec.registration import Address
from ledgers.errors import SessionLostError, UnauthorizedError
from ledgers.model import BookieId, LedgerMetadata, LedgerState, Segment
from ledgers.placement.pulsar import CONFIG_KEY, PULSAR_RACKS_PATH, Isolation, isolation_of
from ledgers.registration import Registration
from ledgers.tasks import RETRY_MIN_S
from replication.cluster import IsolationGroups, ViewSource, bookies_within
from replication.ledger_record import WaitingNote, WaitingNotes
from replication.nodes import Membership
from replication.orders import (
    DrainOrder,
    LimitsOrder,
    MaintenanceWindow,
    Orders,
    OrderStore,
    drain_znode,
    limits_znode,
    maintenance_znode,
)
from replication.reasons import Blocked, Exclusion, Facts, Reason
from replication.repair import OutcomeKind
from tests.replication.cluster import Cluster
from tests.replication.ledger_values import B1, B2, B3, B4, B5, B6, B7, BOOKIES
from tests.replication.nodes import LEDGER, PATHS, ROOT, node_info
from tests.replication.repairs import blocked_by, repair
from tests.replication.watched import settle


async def test_a_change_is_seen_and_wakes_waiting_callers(cluster: Cluster) -> None:
    async with cluster.node() as node:
        await settle()
        before = node.views.current
        waiting = asyncio.create_task(node.views.wait_change(node.views.change_count))

        await cluster.unregister(B2)
        await asyncio.wait_for(waiting, 1)

        assert before.available - node.views.current.available == {B2}
        assert B2 in before.available, "a view never changes"


async def test_a_deleted_cookie_is_seen_and_rereads_no_bookie(cluster: Cluster) -> None:
    """A decommission changes nothing else."""
    await cluster.unregister(B2)
    async with cluster.node() as node:
        await settle()
        waiting = asyncio.create_task(node.views.wait_change(node.views.change_count))
        before = node.store.request_count

        await cluster.store.delete(f"{ROOT}/cookies/{B2}")
        await asyncio.wait_for(waiting, 1)

        assert B2 not in node.views.current.cookies
        assert node.store.request_count - before == 1 + len(node.views.current.cookies)


async def test_reading_the_same_list_again_is_no_change(cluster: Cluster) -> None:
    async with cluster.node() as node:
        await settle()
        count = node.views.change_count

        await node.views.refresh()

        assert node.views.change_count == count


async def test_each_registration_of_a_bookie_has_its_own_czxid(cluster: Cluster) -> None:
    async with cluster.node() as node:
        first = node.views.current.czxid(B1)
        await cluster.unregister(B1)
        await settle()
        absent = node.views.current.czxid(B1)
        await cluster.register(B1)
        await settle()

        assert absent == 0
        assert node.views.current.czxid(B1) > first > 0


async def test_rule_s6_a_bookie_with_a_newer_cookie_is_reported(cluster: Cluster) -> None:
    written = await cluster.write_ledger((B1, B2))
    stat = (await cluster.manager.read(written.ledger_id)).stat
    await cluster.reformat(B2)

    async with cluster.node() as node:
        assert node.views.current.initialised_after(stat.czxid) == {B2}


@pytest.mark.parametrize("is_missing", [False, True], ids=["empty", "missing"])
async def test_rule_s8_an_empty_list_does_not_change_the_view(
    cluster: Cluster, is_missing: bool
) -> None:
    """The same if the znode is missing."""
    async with cluster.node() as node:
        for bookie in BOOKIES:
            await cluster.unregister(bookie)
        await cluster.store.delete(f"{ROOT}/available/readonly")
        if is_missing:
            await cluster.store.delete(f"{ROOT}/available")
        await asyncio.sleep(5)

        assert node.views.current.available

        if is_missing:
            await cluster.store.create(f"{ROOT}/available")
        await cluster.register(B3)
        await asyncio.sleep(5)
        assert node.views.current.available == {B3}


async def test_rule_s13_an_absent_bookie_keeps_its_last_address(cluster: Cluster) -> None:
    async with cluster.node() as node:
        await cluster.unregister(B1)
        await settle()

        assert node.views.resolve(B1) == Address("b1", 3181)
        assert node.views.resolve(BookieId("nobody:1")) == Address("nobody", 1), "by its id"


# --- Orders ---------------------------------------------------------------------------------------


async def test_a_window_ends_without_any_event(cluster: Cluster) -> None:
    order_store = OrderStore(cluster.store, PATHS)
    now_ms = cluster.clock.wall_ms()
    for bookie, seconds in ((B1, 100), (B2, 300)):
        window = MaintenanceWindow(since_ms=now_ms, until_ms=now_ms + seconds * 1000)
        await order_store.give(maintenance_znode(PATHS, bookie), window, over=None)
    async with cluster.node() as node:
        await settle()
        assert node.views.current.orders.maintenance.keys() == {B1, B2}
        assert node.views.current.receiving == frozenset(BOOKIES) - {B1, B2}

        for left, end_s in (({B2}, 100), (set(), 300)):
            await asyncio.wait_for(node.views.wait_change(node.views.change_count), 1_000)
            assert node.views.current.orders.maintenance.keys() == left
            assert (cluster.clock.wall_ms() - now_ms) / 1000 == pytest.approx(end_s, abs=0.1)


async def test_a_change_of_orders_does_not_reread_all_bookies(cluster: Cluster) -> None:
    async with cluster.node() as node:
        await settle()
        before = node.store.request_count

        await OrderStore(cluster.store, PATHS).give(
            limits_znode(PATHS), LimitsOrder(bytes_per_s=5), over=None
        )
        await settle()

        assert node.views.current.orders.limits.bytes_per_s == 5
        assert node.store.request_count - before <= 4 * 2, "two readings of four requests at most"


async def test_unreadable_orders_are_read_when_possible(cluster: Cluster) -> None:
    async with cluster.node() as node:
        await settle()
        cluster.tree.suspend(node.store)
        await OrderStore(cluster.store, PATHS).give(
            drain_znode(PATHS, B1), DrainOrder(since_ms=1), over=None
        )
        await asyncio.sleep(3 * RETRY_MIN_S)
        assert node.views.current.orders.draining == {}, "the view stays as it was"

        cluster.tree.resume(node.store)
        await settle()

        assert node.views.current.orders.draining.keys() == {B1}


async def in_maintenance(cluster: Cluster, orders: OrderStore) -> None:
    """Put B1 in maintenance and stop it."""
    now_ms = cluster.clock.wall_ms()
    window = MaintenanceWindow(since_ms=now_ms, until_ms=now_ms + 3_600_000)
    await orders.give(maintenance_znode(PATHS, B1), window, over=None)
    await cluster.unregister(B1)


async def end_maintenance(cluster: Cluster) -> None:
    """Start B1, and only then end its maintenance."""
    await cluster.register(B1)
    await cluster.store.delete(maintenance_znode(PATHS, B1).path)


class LateEvents(Registration):
    """Bookies of whose changes no event arrives."""

    async def changes(self) -> AsyncGenerator[None, None]:
        yield
        await asyncio.Event().wait()


async def test_a_bookie_is_not_absent_at_the_end_of_its_maintenance(cluster: Cluster) -> None:
    """The event of the order arrives before the event of the registration."""
    orders = OrderStore(cluster.store, PATHS)
    await in_maintenance(cluster, orders)
    views = ViewSource(LateEvents(cluster.store, ROOT), cluster.clock, orders)
    await views.refresh()
    following = asyncio.create_task(views.run())
    await settle()
    assert B1 not in views.current.available

    await end_maintenance(cluster)
    await settle()
    following.cancel()

    assert not views.current.orders.maintenance
    assert B1 in views.current.available


class SlowOrders(OrderStore):
    """Orders that are read only after ``before_read`` has run, once."""

    before_read: Callable[[], Awaitable[None]] | None = None

    async def read(self) -> Orders:
        hook, self.before_read = self.before_read, None
        if hook is not None:
            await hook()
        return await super().read()


async def test_a_maintenance_may_end_while_the_view_is_read(cluster: Cluster) -> None:
    orders = SlowOrders(cluster.store, PATHS)
    await in_maintenance(cluster, orders)
    views = ViewSource(Registration(cluster.store, ROOT), cluster.clock, orders)
    await views.refresh()

    orders.before_read = functools.partial(end_maintenance, cluster)
    view = await views.refresh()

    assert not view.orders.maintenance
    assert B1 in view.available


POLICY = "org.apache.pulsar.bookie.rackawareness.IsolatedBookieEnsemblePlacementPolicy"
B8 = BookieId("b8:3181")
GROUPS = {"a": (B1, B2, B3, B4), "b": (B5,), "c": (B6, B7)}


def config(policy: str = POLICY, **properties: object) -> tuple[tuple[str, bytes], ...]:
    return ((CONFIG_KEY, json.dumps({"policyClass": policy, "properties": properties}).encode()),)


PRIMARY_A = config(isolationBookieGroups="a")


def metadata(custom: tuple[tuple[str, bytes], ...]) -> LedgerMetadata:
    return LedgerMetadata(
        ensemble_size=3,
        write_quorum=3,
        ack_quorum=2,
        custom=custom,
        segments=(Segment(first_entry_id=0, ensemble=(B1, B2, B3)),),
    )


@pytest.mark.parametrize(
    ("custom", "isolation"),
    [
        pytest.param((), None, id="none"),
        pytest.param(PRIMARY_A, Isolation(frozenset("a")), id="primary"),
        pytest.param(
            config(isolationBookieGroups="a,b", secondaryIsolationBookieGroups="c"),
            Isolation(frozenset("ab"), frozenset("c")),
            id="both",
        ),
        pytest.param(
            config(isolationBookieGroups=["a", "b"]), Isolation(frozenset("ab")), id="a list"
        ),
        pytest.param(
            config(
                "org.apache.pulsar.zookeeper.ZkIsolatedBookieEnsemblePlacementPolicy",
                isolationBookieGroups="a",
            ),
            Isolation(frozenset("a")),
            id="the class of older releases",
        ),
        pytest.param(config(isolationBookieGroups=""), None, id="no group"),
        pytest.param(config(isolationBookieGroups="*"), None, id="any group"),
        pytest.param(config("x.Other", isolationBookieGroups="a"), None, id="another policy"),
        pytest.param(((CONFIG_KEY, b"{"),), None, id="unreadable"),
        pytest.param(((CONFIG_KEY, b'{"a":' * 60_000),), None, id="deeply nested"),
    ],
)
def test_the_metadata_names_the_isolation_groups(
    custom: tuple[tuple[str, bytes], ...], isolation: Isolation | None
) -> None:
    assert isolation_of(metadata(custom)) == isolation


# --- The rule -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("writable", "expected"),
    [
        pytest.param((B1, B2, B3, B5, B6), {B1, B2, B3, B4}, id="enough in the primary"),
        pytest.param((B1, B2, B5, B6), {B1, B2, B3, B4, B5}, id="the secondary helps out"),
        pytest.param(
            (B1, B6, B8),
            {B1, B2, B3, B4, B5, B8},
            id="then any bookie without a group, and no other",
        ),
    ],
)
def test_secondary_groups_count_if_primary_ones_have_too_few(
    writable: tuple[BookieId, ...], expected: set[BookieId]
) -> None:
    groups = {name: frozenset(bookies) for name, bookies in GROUPS.items()}
    isolation = Isolation(frozenset("a"), frozenset("b"))

    assert bookies_within(isolation, groups, writable, ensemble_size=3) == expected


async def isolated(groups: Mapping[str, tuple[BookieId, ...]] = GROUPS) -> Cluster:
    cluster = await Cluster.start(B1, B2, B3, B4, B5, B6, B7)
    text = {name: {b: {"rack": "/r"} for b in bookies} for name, bookies in groups.items()}
    await cluster.store.create(PULSAR_RACKS_PATH, json.dumps(text).encode())
    return cluster


@pytest.mark.parametrize(("may_leave", "is_bound"), [(False, True), (True, False)])
async def test_a_setting_allows_copies_outside_the_groups(may_leave: bool, is_bound: bool) -> None:
    """It counts when no bookie of the groups is left."""
    cluster = await isolated()
    groups = IsolationGroups(cluster.store, cluster.clock, may_leave=may_leave)
    await groups.refresh()

    allowed = groups.allowed(metadata(PRIMARY_A), {B1, B2, B5, B6})

    assert (allowed is not None) is is_bound


async def test_unreadable_groups_leave_the_last_ones_in_force() -> None:
    cluster = await isolated()
    groups = IsolationGroups(cluster.store, cluster.clock)
    await groups.refresh()

    with capture_logs() as events:
        await cluster.store.set(PULSAR_RACKS_PATH, b"[", version=-1)
        assert not await groups.refresh()
        assert not await groups.refresh()

    assert [e["event"] for e in events] == ["isolation.unreadable"]
    assert groups.allowed(metadata(PRIMARY_A), {B1, B5}) == frozenset({B1, B2, B3, B4})


async def test_denied_access_to_the_groups_does_not_end_the_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def refused(path: str) -> AsyncGenerator[None, None]:
        raise UnauthorizedError("the ACL shuts us out")
        yield

    cluster = await isolated()
    monkeypatch.setattr(cluster.store, "watch", refused)
    groups = IsolationGroups(cluster.store, cluster.clock)

    following = asyncio.create_task(groups.run())
    await cluster.clock.sleep(1)

    assert not following.done()
    following.cancel()


# --- Repairs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
async def test_copies_stay_in_the_primary_group(seed: int) -> None:
    cluster = await isolated()
    cluster.seed = seed
    await cluster.write_ledger((B1, B2, B3), custom=PRIMARY_A)
    await cluster.mark(B2)
    await cluster.kill(B2)

    outcome = await repair(cluster)

    assert outcome.kind is OutcomeKind.DONE
    assert await cluster.ensembles() == [(B1, B4, B3)]


async def test_without_any_bookie_of_the_groups_the_ledger_waits() -> None:
    """The reason is noted."""
    cluster = await isolated()
    await cluster.write_ledger((B1, B2, B3), custom=PRIMARY_A)
    await cluster.mark(B2)
    for bookie in (B2, B4):
        await cluster.kill(bookie)

    outcome = await repair(cluster)

    assert outcome.reason is Reason.NO_TARGET
    assert (Exclusion.ISOLATED, 3) in (blocked_by(outcome).facts.excluded or ())
    assert await cluster.ensembles() == [(B1, B2, B3)]


async def test_a_member_outside_the_groups_gets_its_missing_entries() -> None:
    cluster = await isolated()
    await cluster.write_ledger((B1, B2, B6), custom=PRIMARY_A)
    cluster.bookies.bookie(B6).lose(LEDGER, 1)
    await cluster.mark(B6)

    async with cluster.node() as node:
        assert (await node.repairer.repair(await node.lease())).kind is OutcomeKind.DONE

    await cluster.assert_whole()


async def test_a_recovered_ledger_stays_in_the_groups() -> None:
    cluster = await isolated()
    await cluster.write_ledger(
        (B1, B2, B3), write_quorum=3, ack_quorum=2, custom=PRIMARY_A, state=LedgerState.OPEN
    )
    await cluster.mark(B2)
    await cluster.kill(B2)

    async with cluster.node() as node:
        lease, outcome = await node.first_try()
        outcome = await node.repairer.repair(lease, outcome.sighting)

    assert outcome.kind is OutcomeKind.DONE
    assert (await cluster.metadata()).bookies == {B1, B3, B4}


# --- Directories that were deleted by hand --------------------------------------------------------

NOTE = WaitingNote(
    ledger_id=LEDGER,
    blocked=Blocked(reason=Reason.LEFT_TO_OTHERS, facts=Facts(errors=("put back by hand",))),
    node="host-a",
    since_ms=5,
    suspects=frozenset({B1}),
)


async def test_a_session_without_its_znode_ends_when_nodes_are_counted(cluster: Cluster) -> None:
    membership = await Membership.join(cluster.store, PATHS, node_info("host-a"))

    await cluster.store.delete(membership.path)

    assert await cluster.store.children(PATHS.nodes) == []
    with pytest.raises(SessionLostError, match="deleted"):
        await membership.reader_count()


async def test_bad_sources_are_noted_in_a_recreated_directory(cluster: Cluster) -> None:
    await cluster.store.delete(PATHS.waiting)
    notes = WaitingNotes(cluster.store, PATHS)

    await notes.let_go(LEDGER, guards=(), beside=NOTE)

    left = await notes.read(LEDGER)
    assert left is not None
    assert left.suspects == {B1}


async def test_registered_bookies_without_a_cookie_are_logged_once(cluster: Cluster) -> None:
    async with cluster.node() as node:
        for bookie in BOOKIES:
            await cluster.store.delete(f"{ROOT}/cookies/{bookie}")
        await cluster.store.delete(f"{ROOT}/cookies")

        with capture_logs() as logs:
            for _ in range(2):
                await node.views.refresh()

    told = [line for line in logs if line["event"] == "cookies.missing"]
    assert [line["bookies"] for line in told] == [sorted(BOOKIES)]
