"""The leader records, for all nodes, the racks of absent bookies."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager

import pytest

from auditor.election import Election
from ledgers.errors import LeadershipLostError
from ledgers.placement.topology import Racks
from ledgers.registration import Registration
from ledgers.store import Operation
from replication.cluster import ViewSource
from replication.nodes import Membership, Role
from replication.racks import RETRY_S, RackKeeper, RackMemory, remembered_racks
from replication.transactions import Batcher
from tests.memory.store import Fault, MemoryStore
from tests.replication.cluster import Cluster, shut_out
from tests.replication.ledger_values import B1, B2, B3
from tests.replication.nodes import PATHS, ROOT, node_info


class Table:
    """A source that knows the racks of registered bookies only, like a script asked by address."""

    name = "table"

    def __init__(self) -> None:
        self.racks: dict[str, str] = {}
        self.changed = asyncio.Event()

    async def read(self, hosts: Collection[str]) -> Mapping[str, str]:
        return dict(self.racks)

    async def changes(self) -> AsyncGenerator[None, None]:
        while True:
            yield
            await self.changed.wait()
            self.changed.clear()

    def tell(self, racks: Mapping[str, str]) -> None:
        self.racks = dict(racks)
        self.changed.set()


@asynccontextmanager
async def remembering(cluster: Cluster, table: Table) -> AsyncIterator[MemoryStore]:
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
    rack_keeper = RackKeeper(table, racks, views, clock=cluster.clock, resolve_host=_no_address)
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


async def _no_address(host: str) -> str | None:
    return None


async def test_racks_are_remembered_also_of_absent_bookies() -> None:
    cluster = await Cluster.start(B1, B2)
    table = Table()
    table.tell({B1: "/a", B2: "/b"})

    async with remembering(cluster, table):
        assert await remembered_racks(cluster.store, PATHS) == {B1: "/a", B2: "/b"}
        await cluster.kill(B2)
        await asyncio.sleep(1)
        table.tell({B1: "/c"})
        await asyncio.sleep(1)

        assert await remembered_racks(cluster.store, PATHS) == {B1: "/c", B2: "/b"}


async def test_the_next_leader_keeps_the_racks_of_existing_bookies() -> None:
    """It forgets decommissioned ones."""
    cluster = await Cluster.start(B1, B2, B3)
    table = Table()
    table.tell({B1: "/a", B2: "/b", B3: "/c"})
    async with remembering(cluster, table):
        pass
    await cluster.kill(B2, B3)
    await cluster.store.delete(f"{ROOT}/cookies/{B3}")
    table.tell({B1: "/a"})

    async with remembering(cluster, table):
        assert await remembered_racks(cluster.store, PATHS) == {B1: "/a", B2: "/b"}


async def test_unchanged_racks_are_not_written() -> None:
    cluster = await Cluster.start(B1, B2)
    table = Table()
    table.tell({B1: "/a"})
    async with remembering(cluster, table):
        table.tell({B1: "/a"})
        await asyncio.sleep(1)
    async with remembering(cluster, table):
        pass

    assert (await cluster.store.get(PATHS.racks))[1].version == 0


async def test_a_failed_write_is_repeated() -> None:
    cluster = await Cluster.start(B1)
    table = Table()
    failures = 3

    def fail(store: MemoryStore, operations: Collection[Operation]) -> Fault | None:
        nonlocal failures
        if failures and any(each.path == PATHS.racks for each in operations):
            failures -= 1
            return Fault.LOST_REQUEST
        return None

    cluster.tree.faults = fail
    table.tell({B1: "/a"})

    async with remembering(cluster, table):
        await asyncio.sleep(60)

        assert await remembered_racks(cluster.store, PATHS) == {B1: "/a"}
    assert not failures


async def test_rule_s9_a_former_leader_writes_nothing() -> None:
    cluster = await Cluster.start(B1)
    table = Table()
    table.tell({B1: "/a"})

    async def deposed() -> None:
        async with remembering(cluster, table):
            votes = await cluster.store.children(PATHS.election)
            await cluster.store.delete(f"{PATHS.election}/{votes[0]}")
            table.tell({B1: "/b"})
            await asyncio.sleep(5)

    with pytest.raises(ExceptionGroup) as ended:
        await deposed()
    assert ended.group_contains(LeadershipLostError)
    assert await remembered_racks(cluster.store, PATHS) == {B1: "/a"}


async def test_denied_access_is_survived_and_the_write_is_made_later() -> None:
    cluster = await Cluster.start(B1)
    table = Table()
    table.tell({B1: "/a"})
    async with remembering(cluster, table):
        pass
    shut = shut_out(cluster.store, PATHS.racks)
    assert await remembered_racks(cluster.store, PATHS) == {}
    shut.clear()

    async with remembering(cluster, table) as leader:
        shut = shut_out(leader, PATHS.racks)
        table.tell({B1: "/b"})
        await asyncio.sleep(5)
        shut.clear()
        await asyncio.sleep(2 * RETRY_S)

        assert await remembered_racks(cluster.store, PATHS) == {B1: "/b"}
