"""Racks from a source reach the placement, and stay when the source breaks."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager

import pytest
from prometheus_client import REGISTRY
from structlog.testing import capture_logs

from auditor.election import Election
from ledgers.errors import LeadershipLostError, SessionLostError, UnavailableError
from ledgers.model import BookieId
from ledgers.placement import DEFAULT_RACK
from ledgers.placement.topology import Racks
from ledgers.registration import Registration
from ledgers.store import ANY_VERSION, Operation
from replication.cluster import ViewSource
from replication.nodes import Membership, Role
from replication.racks import (
    RETRY_S,
    START_TIMEOUT_S,
    RackKeeper,
    RackMemory,
    RackSource,
    ZnodeRacks,
    has_unused_racks,
    remembered_racks,
)
from replication.transactions import Batcher
from tests.memory.store import Fault, MemoryStore
from tests.replication.cluster import Cluster, shut_out
from tests.replication.ledger_values import B1, B2, B3
from tests.replication.nodes import PATHS, ROOT, node_info

PATH = "/bookies"
WITHOUT_RACK = "bookmender_registered_bookies_without_rack"


async def no_address(host: str) -> str | None:
    return None


@asynccontextmanager
async def keeping(
    cluster: Cluster, source: RackSource, *, ips: Mapping[str, str] | None = None
) -> AsyncIterator[Racks]:
    """Yield the racks of the cluster, kept current from the source."""

    async def resolve(host: str) -> str | None:
        return (ips or {}).get(host)

    views = ViewSource(Registration(cluster.store, ROOT), cluster.clock)
    await views.refresh()
    racks = Racks()
    keeper = RackKeeper(source, racks, views, clock=cluster.clock, resolve_host=resolve)
    await keeper.start()
    async with asyncio.TaskGroup() as tasks:
        followers = [tasks.create_task(views.run()), tasks.create_task(keeper.run())]
        await cluster.clock.sleep(1)
        yield racks
        for follower in followers:
            follower.cancel()


class TableSource:
    """A source that returns its table, and is asked again when a test says so."""

    name = "table"

    def __init__(self, table: Mapping[str, str]) -> None:
        self.table = dict(table)
        self.error: Exception | None = None
        self.hangs = False
        self.delay_s = 0.0
        self.asked: list[list[str]] = []
        self._changed = asyncio.Event()

    async def read(self, hosts: Collection[str]) -> Mapping[str, str]:
        self.asked.append(list(hosts))
        if self.hangs:
            await asyncio.Event().wait()
        await asyncio.sleep(self.delay_s)
        if self.error is not None:
            raise self.error
        return dict(self.table)

    async def changes(self) -> AsyncGenerator[None, None]:
        yield
        while True:
            await self._changed.wait()
            self._changed.clear()
            yield

    def change(self, table: Mapping[str, str]) -> None:
        self.table = dict(table)
        self._changed.set()


def racks_of(racks: Racks, *bookies: BookieId) -> list[str]:
    return [racks.rack(bookie) for bookie in bookies]


async def test_a_change_of_the_source_counts_at_once() -> None:
    cluster = await Cluster.start(B1, B2)
    source = TableSource({B1: "/a", B2: "/b"})

    async with keeping(cluster, source) as racks:
        assert racks_of(racks, B1, B2) == ["/a", "/b"]
        source.change({B1: "/a", B2: "/c"})
        await cluster.clock.sleep(1)

        assert racks_of(racks, B1, B2) == ["/a", "/c"]


async def test_a_new_bookie_has_its_rack_at_once() -> None:
    cluster = await Cluster.start(B1)
    source = TableSource({B1: "/a", B3: "/c"})

    async with keeping(cluster, source) as racks:
        assert racks.rack(B3) == DEFAULT_RACK
        await cluster.register(B3)
        await cluster.clock.sleep(1)

        assert racks.rack(B3) == "/c"


async def test_bookies_without_a_rack_are_counted() -> None:
    cluster = await Cluster.start(B1, B2)
    counted = []

    async with keeping(cluster, source := TableSource({B1: "/a"})):
        counted.append(REGISTRY.get_sample_value(WITHOUT_RACK))
        await cluster.register(B3)
        await cluster.clock.sleep(1)
        counted.append(REGISTRY.get_sample_value(WITHOUT_RACK))
        await cluster.unregister(B2)
        await cluster.clock.sleep(1)
        counted.append(REGISTRY.get_sample_value(WITHOUT_RACK))
        source.change({B1: "/a", B3: "/c"})
        await cluster.clock.sleep(1)
        counted.append(REGISTRY.get_sample_value(WITHOUT_RACK))

    assert counted == [1, 2, 1, 0]


async def test_a_source_that_fails_for_a_new_bookie_is_soon_retried() -> None:
    cluster = await Cluster.start(B1)
    source = TableSource({B1: "/a", B3: "/c"})

    async with keeping(cluster, source) as racks:
        source.error = UnavailableError("took too long")
        await cluster.register(B3)
        await cluster.clock.sleep(1)
        source.error = None
        await cluster.clock.sleep(2 * RETRY_S)

        assert racks.rack(B3) == "/c"


async def test_a_bookie_that_appears_during_a_request_is_next() -> None:
    cluster = await Cluster.start(B1)
    source = TableSource({B1: "/a", B2: "/b", B3: "/c"})

    async with keeping(cluster, source) as racks:
        source.delay_s = 5
        await cluster.register(B2)
        await cluster.clock.sleep(1)
        await cluster.register(B3)
        await cluster.clock.sleep(20)

        assert (racks.rack(B2), racks.rack(B3)) == ("/b", "/c")


async def test_a_bookie_that_disappears_keeps_its_rack() -> None:
    """G19."""
    cluster = await Cluster.start(B1, B2)
    source = TableSource({B1: "/a", B2: "/b"})

    async with keeping(cluster, source) as racks:
        await cluster.store.delete(f"{ROOT}/available/{B2}")
        await cluster.store.delete(f"{ROOT}/cookies/{B2}")
        await cluster.clock.sleep(1)
        source.change({B1: "/a"})
        await cluster.clock.sleep(1)

        assert racks.rack(B2) == "/b"


async def test_a_bookie_that_was_always_absent_is_asked_about_too() -> None:
    """G19: its cookie shows that the bookie exists."""
    cluster = await Cluster.start(B1, B2)
    await cluster.store.delete(f"{ROOT}/available/{B2}")

    async with keeping(cluster, TableSource({B1: "/a", B2: "/b"})) as racks:
        assert racks.rack(B2) == "/b"


async def test_the_source_is_asked_by_ip_address_and_may_answer_by_it() -> None:
    cluster = await Cluster.start(B1)
    host = B1.rpartition(":")[0]
    source = TableSource({"10.0.0.1": "/a"})

    async with keeping(cluster, source, ips={host: "10.0.0.1"}) as racks:
        assert racks.rack(B1) == "/a"
        assert set(map(tuple, source.asked)) == {("10.0.0.1",)}


async def test_a_broken_source_is_reported_once_and_racks_are_kept() -> None:
    cluster = await Cluster.start(B1)
    source = TableSource({B1: "/a"})

    with capture_logs() as logs:
        async with keeping(cluster, source) as racks:
            source.error = UnavailableError("it is gone; put it back")
            source.change({B1: "/b"})
            await cluster.clock.sleep(10 * RETRY_S)
            assert racks.rack(B1) == "/a"
            source.error = None
            await cluster.clock.sleep(2 * RETRY_S)

            assert racks.rack(B1) == "/b"

    told = [entry for entry in logs if entry["event"].startswith("racks.")]
    assert [entry["event"] for entry in told] == [
        "racks.changed",
        "racks.unreadable",
        "racks.changed",
        "racks.readable_again",
    ]
    assert told[1]["error"] == "it is gone; put it back"
    assert told[1]["source"] == "table"


async def test_a_hanging_source_does_not_delay_the_start() -> None:
    cluster = await Cluster.start(B1)
    source = TableSource({})
    source.hangs = True
    began_s = cluster.clock.now_s()

    async with keeping(cluster, source) as racks:
        assert cluster.clock.now_s() - began_s <= START_TIMEOUT_S + 2
        assert racks.rack(B1) == DEFAULT_RACK


# --- Pulsar's znode -------------------------------------------------------------------------------


async def test_pulsars_znode_is_followed() -> None:
    cluster = await Cluster.start(B1)
    await cluster.store.create(PATH, f'{{"g": {{"{B1}": {{"rack": "/a"}}}}}}'.encode())

    async with keeping(cluster, ZnodeRacks(cluster.store, PATH)) as racks:
        assert racks.rack(B1) == "/a"
        data = f'{{"g": {{"{B1}": {{"rack": "/b"}}}}}}'.encode()
        await cluster.store.set(PATH, data, version=ANY_VERSION)
        await cluster.clock.sleep(1)

        assert racks.rack(B1) == "/b"


async def test_a_znode_created_later_is_read_then() -> None:
    cluster = await Cluster.start(B1)

    async with keeping(cluster, ZnodeRacks(cluster.store, PATH)) as racks:
        await cluster.store.create(PATH, f'{{"g": {{"{B1}": {{"rack": "/a"}}}}}}'.encode())
        await cluster.clock.sleep(2 * RETRY_S)

        assert racks.rack(B1) == "/a"


async def test_a_znode_that_is_no_map_does_not_change_the_racks() -> None:
    cluster = await Cluster.start(B1)
    await cluster.store.create(PATH, f'{{"g": {{"{B1}": {{"rack": "/a"}}}}}}'.encode())

    async with keeping(cluster, ZnodeRacks(cluster.store, PATH)) as racks:
        await cluster.store.set(PATH, b"?", version=ANY_VERSION)
        await cluster.clock.sleep(2 * RETRY_S)

        assert racks.rack(B1) == "/a"


async def test_without_the_znode_the_error_says_what_to_do() -> None:
    cluster = await Cluster.start(B1)

    with pytest.raises(UnavailableError, match=r"or empty placement\.racks_znode"):
        await ZnodeRacks(cluster.store, PATH).read([])


async def test_the_end_of_the_session_ends_the_updates() -> None:
    cluster = await Cluster.start(B1)
    views = ViewSource(Registration(cluster.store, ROOT), cluster.clock)
    await views.refresh()
    source = TableSource({})
    source.error = SessionLostError("over")
    keeper = RackKeeper(source, Racks(), views, clock=cluster.clock, resolve_host=no_address)

    with pytest.raises(SessionLostError):
        await keeper.start()


async def test_racks_that_are_not_updated_are_noticed() -> None:
    cluster = await Cluster.start(B1)

    assert not await has_unused_racks(cluster.store)
    await cluster.store.create(PATH, b"{}")
    assert await has_unused_racks(cluster.store)
    shut_out(cluster.store, PATH)
    assert await has_unused_racks(cluster.store), "whatever ACLs say"


# --- The leader records, for all nodes, the racks of absent bookies -------------------------------


@asynccontextmanager
async def remembering(cluster: Cluster, table: TableSource) -> AsyncIterator[MemoryStore]:
    """Run a leader's rack memory on its own session. Its error ends the body."""
    store = MemoryStore(cluster.tree)
    views = ViewSource(Registration(store, ROOT), cluster.clock)
    await views.refresh()
    membership = await Membership.join(store, PATHS, node_info("leader", Role.AUDITOR))
    leadership = await Election(
        store, PATHS, membership, candidate="leader", clock=cluster.clock
    ).win()
    batcher = Batcher(store, leadership.guards)
    racks = Racks(await remembered_racks(store, PATHS))
    rack_keeper = RackKeeper(table, racks, views, clock=cluster.clock, resolve_host=no_address)
    memory = RackMemory(
        store=store,
        batcher=batcher,
        paths=PATHS,
        racks=racks,
        rack_keeper=rack_keeper,
        views=views,
        clock=cluster.clock,
    )
    async with asyncio.TaskGroup() as tasks:
        running = [
            tasks.create_task(work)
            for work in (views.run(), batcher.run(), rack_keeper.run(), memory.run())
        ]
        await asyncio.sleep(1)
        yield store
        for task in running:
            task.cancel()
    await store.close()


async def test_racks_are_remembered_also_of_absent_bookies() -> None:
    cluster = await Cluster.start(B1, B2)
    table = TableSource({B1: "/a", B2: "/b"})

    async with remembering(cluster, table):
        assert await remembered_racks(cluster.store, PATHS) == {B1: "/a", B2: "/b"}
        await cluster.kill(B2)
        await asyncio.sleep(1)
        table.change({B1: "/c"})
        await asyncio.sleep(1)

        assert await remembered_racks(cluster.store, PATHS) == {B1: "/c", B2: "/b"}


async def test_the_next_leader_keeps_the_racks_of_existing_bookies() -> None:
    """It forgets decommissioned ones."""
    cluster = await Cluster.start(B1, B2, B3)
    table = TableSource({B1: "/a", B2: "/b", B3: "/c"})
    async with remembering(cluster, table):
        pass
    await cluster.kill(B2, B3)
    await cluster.store.delete(f"{ROOT}/cookies/{B3}")
    table.change({B1: "/a"})

    async with remembering(cluster, table):
        assert await remembered_racks(cluster.store, PATHS) == {B1: "/a", B2: "/b"}


async def test_unchanged_racks_are_not_written() -> None:
    cluster = await Cluster.start(B1, B2)
    table = TableSource({B1: "/a"})
    async with remembering(cluster, table):
        table.change({B1: "/a"})
        await asyncio.sleep(1)
    async with remembering(cluster, table):
        pass

    assert (await cluster.store.get(PATHS.racks))[1].version == 0


async def test_a_failed_write_is_repeated() -> None:
    cluster = await Cluster.start(B1)
    table = TableSource({B1: "/a"})
    failures = 3

    def fail(store: MemoryStore, operations: Collection[Operation]) -> Fault | None:
        nonlocal failures
        if failures and any(each.path == PATHS.racks for each in operations):
            failures -= 1
            return Fault.LOST_REQUEST
        return None

    cluster.tree.faults = fail

    async with remembering(cluster, table):
        await asyncio.sleep(60)

        assert await remembered_racks(cluster.store, PATHS) == {B1: "/a"}
    assert not failures


async def test_rule_s9_a_former_leader_writes_nothing() -> None:
    cluster = await Cluster.start(B1)
    table = TableSource({B1: "/a"})

    async def deposed() -> None:
        async with remembering(cluster, table):
            votes = await cluster.store.children(PATHS.election)
            await cluster.store.delete(f"{PATHS.election}/{votes[0]}")
            table.change({B1: "/b"})
            await asyncio.sleep(5)

    with pytest.raises(ExceptionGroup) as ended:
        await deposed()
    assert ended.group_contains(LeadershipLostError)
    assert await remembered_racks(cluster.store, PATHS) == {B1: "/a"}


async def test_denied_access_is_survived_and_the_write_is_made_later() -> None:
    cluster = await Cluster.start(B1)
    table = TableSource({B1: "/a"})
    async with remembering(cluster, table):
        pass
    shut = shut_out(cluster.store, PATHS.racks)
    assert await remembered_racks(cluster.store, PATHS) == {}
    shut.clear()

    async with remembering(cluster, table) as leader:
        shut = shut_out(leader, PATHS.racks)
        table.change({B1: "/b"})
        await asyncio.sleep(5)
        shut.clear()
        await asyncio.sleep(2 * RETRY_S)

        assert await remembered_racks(cluster.store, PATHS) == {B1: "/b"}
