"""The feed after ZooKeeper was restored from a backup: who notices, and what clients are told.

The evidence is never in ZooKeeper: it is on the disks of nodes, in the stores of clients, in their
processes, or at bookies. Zxids go back (a standalone server), or jump to a later epoch.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from checkpoints import client as client_module
from checkpoints.batches import BatchReader, ChangesLostError, Offset, batch_between, latest_offset
from checkpoints.chain import FeedChain, Kind, Segment
from checkpoints.client import (
    IN_ZOOKEEPER,
    ClientProcess,
    ClusterConnection,
    FeedClient,
    open_client_in,
)
from checkpoints.errors import FeedChangedError
from checkpoints.leader_state import FeedSettings
from checkpoints.model import CommittedVersion, ledger_key
from checkpoints.receipts import ReceiptStore
from checkpoints.restores import ChainFile, KnownChain
from ledgers.errors import ClientFencedError, SessionLostError, UnavailableError
from tests.checkpoints.feed_cluster import PATHS, ROOT, FeedCluster, MemoryDisk
from tests.ledgers.scripted_bookie import in_loop
from tests.memory.feed import MemoryReceipts
from tests.replication.cluster import in_virtual_time

EPOCHS = pytest.mark.parametrize("epochs", [0, 1], ids=["zxids go back", "a later epoch"])


class Catalogue:
    """A program that keeps a set of all ledgers, as in docs/feed.md."""

    def __init__(self, cluster: FeedCluster, *, receipts: str = IN_ZOOKEEPER) -> None:
        self.cluster, self.receipts = cluster, receipts
        self.process = ClientProcess()
        self.ledger_ids: set[int] = set()
        self.comparison_count = 0
        self._changes: asyncio.Queue[CommittedVersion] = asyncio.Queue()

    async def receive(self, committed: CommittedVersion) -> None:
        self._changes.put_nowait(committed)

    async def run(self) -> None:
        """Follow the feed until cancelled, over one session after the other."""
        while True:
            try:
                await self._follow()
            except (SessionLostError, FeedChangedError, UnavailableError):
                await asyncio.sleep(1)

    async def _follow(self) -> None:
        async with opened(self.cluster, self.process, receipts=self.receipts) as client:
            missed = await client.service.subscribe(self)
            if missed.is_new or missed.lifted:
                self.comparison_count += 1
                self.ledger_ids = {ledger_id async for ledger_id in client.ledger_ids()}
            for committed in missed:
                await self._handle(client, committed)
            while True:
                await self._handle(client, await self._changes.get())

    async def _handle(self, client: FeedClient, committed: CommittedVersion) -> None:
        ledger_id = committed.ledger_id
        assert ledger_id is not None
        if await client.metadata(ledger_id, version=committed.version) is None:
            self.ledger_ids.discard(ledger_id)
        else:
            self.ledger_ids.add(ledger_id)
        client.service.submit_receipt(committed.key, committed.version)

    async def follow(self, duration_s: float = 30) -> None:
        """Follow the feed in this process for a while."""
        task = asyncio.create_task(self.run())
        await asyncio.sleep(duration_s)
        task.cancel()
        (error,) = await asyncio.gather(task, return_exceptions=True)
        assert isinstance(error, asyncio.CancelledError), error


@asynccontextmanager
async def opened(
    cluster: FeedCluster, process: ClientProcess, *, receipts: str = IN_ZOOKEEPER
) -> AsyncIterator[FeedClient]:
    store = await cluster.open_store()
    connection = ClusterConnection(store=store, manager=cluster.new_manager(store), root=ROOT)
    try:
        async with open_client_in(
            connection,
            name="a",
            store=receipts,
            process=process,
            clock=cluster.clock,
            bookies=cluster.bookies,
        ) as client:
            yield client
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    finally:
        await store.close()


def keep_receipts_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep receipts as in a database: ZooKeeper's restore does not touch them. SQL itself has no
    virtual time; ``test_stores`` shows that it keeps the same."""
    table = MemoryReceipts()

    async def open_receipts(
        url: str, *, name: str, process: ClientProcess, **_: object
    ) -> tuple[ReceiptStore, bool]:
        return await table.open(name, process), False

    monkeypatch.setattr(client_module, "open_receipts", open_receipts)


@asynccontextmanager
async def restored(
    catalogue: Catalogue,
    *,
    epochs: int,
    disk: MemoryDisk | None = None,
    standby: MemoryDisk | None = None,
    collects: bool = True,
    is_running: bool = False,
) -> AsyncIterator[None]:
    """Run the block after a restore. The backup was made before a day on which 1001 was deleted and
    1004 created, in another log ledger. The catalogue followed all day."""
    cluster = catalogue.cluster
    async with nodes(cluster, disk, standby):
        await cluster.enable()
        for _ in range(3):
            await cluster.create()
        await catalogue.follow()
    backup = cluster.back_up()
    async with AsyncExitStack() as stack:
        async with nodes(cluster, disk, standby):
            await cluster.delete(1001)
            await cluster.create(1004)
            if is_running:
                task = asyncio.create_task(catalogue.run())
                stack.callback(task.cancel)
                await asyncio.sleep(30)
            else:
                await catalogue.follow()
        assert {1001, 1004} & catalogue.ledger_ids == {1004}
        cluster.restore(backup, epochs=epochs, collects=collects)
        async with nodes(cluster, disk, standby):
            yield


@asynccontextmanager
async def nodes(
    cluster: FeedCluster, disk: MemoryDisk | None, standby: MemoryDisk | None
) -> AsyncIterator[None]:
    async with cluster.leader(disk):
        await asyncio.sleep(1)
        if standby is None:
            yield
            return
        async with cluster.leader(standby):
            yield


async def assert_told(catalogue: Catalogue, *, comparison_count: int) -> None:
    """Assert that the catalogue becomes right and stays so while zxids pass the former ones."""
    cluster = catalogue.cluster
    following = asyncio.create_task(catalogue.follow())
    for number in range(20):
        await asyncio.sleep(1)
        await cluster.change(1002)
        if number == 10:
            await cluster.create(1005)
    await following
    assert catalogue.ledger_ids == cluster.ledgers().keys()
    assert catalogue.comparison_count == comparison_count
    await cluster.delete(1005)
    await catalogue.follow()
    assert catalogue.ledger_ids == cluster.ledgers().keys()
    assert catalogue.comparison_count == comparison_count


# --- Each kind of evidence suffices alone ---------------------------------------------------------


@EPOCHS
@in_virtual_time
async def test_a_client_knows_it_from_its_receipts(
    epochs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_receipts_outside(monkeypatch)
    catalogue = Catalogue(await FeedCluster.start())
    async with restored(catalogue, epochs=epochs):
        generation = (await catalogue.cluster.chain()).generation
        await asyncio.sleep(60)

        catalogue.process = ClientProcess()
        await assert_told(catalogue, comparison_count=2)

        assert (await catalogue.cluster.chain()).generation == generation, "nobody else knows it"


@EPOCHS
@in_virtual_time
async def test_a_running_client_knows_it_although_its_receipts_were_restored(epochs: int) -> None:
    catalogue = Catalogue(await FeedCluster.start())
    async with restored(catalogue, epochs=epochs, is_running=True):
        await asyncio.sleep(60)

        assert catalogue.ledger_ids == catalogue.cluster.ledgers().keys()
        assert catalogue.comparison_count == 2


@EPOCHS
@in_virtual_time
async def test_a_node_knows_it_from_its_disk(epochs: int) -> None:
    catalogue = Catalogue(await FeedCluster.start())
    with capture_logs() as logs:
        async with restored(catalogue, epochs=epochs, disk=MemoryDisk()):
            await asyncio.sleep(60)
            assert (await catalogue.cluster.chain()).is_after_restore
            catalogue.process = ClientProcess()
            await assert_told(catalogue, comparison_count=2)
    (event,) = [each for each in logs if each["event"] == "feed.zookeeper_restored"]
    assert event["next_step"]


@EPOCHS
@in_virtual_time
async def test_a_standby_may_be_the_only_node_that_knows_it(epochs: int) -> None:
    """The leader is a new node, or one of an earlier release."""
    catalogue = Catalogue(await FeedCluster.start())
    async with restored(catalogue, epochs=epochs, standby=MemoryDisk()):
        await asyncio.sleep(60)
        assert (await catalogue.cluster.chain()).is_after_restore
        catalogue.process = ClientProcess()
        await assert_told(catalogue, comparison_count=2)


@EPOCHS
@in_virtual_time
async def test_a_leader_knows_it_from_bookies_that_have_entries_of_a_new_ledger(
    epochs: int,
) -> None:
    catalogue = Catalogue(await FeedCluster.start())
    async with restored(catalogue, epochs=epochs, collects=False):
        await asyncio.sleep(60)
        chain = await catalogue.cluster.chain()
        assert chain.is_after_restore
        catalogue.process = ClientProcess()
        await assert_told(catalogue, comparison_count=2)
        await catalogue.cluster.assert_log_is_right()
        assert (await catalogue.cluster.chain()).generation == chain.generation


@in_virtual_time
async def test_a_leader_knows_it_from_a_log_that_is_later_than_zookeeper() -> None:
    """The log ledger of the backup is still the last one, and has what followed."""
    cluster = await FeedCluster.start()
    with capture_logs() as logs:
        async with cluster.leader():
            await cluster.enable()
            await cluster.create()
            await asyncio.sleep(10)
            backup = cluster.back_up()
            for _ in range(50):
                await cluster.create()
            await asyncio.sleep(10)
        cluster.restore(backup, epochs=0)
        async with cluster.leader() as leader:
            await asyncio.sleep(30)
            assert leader.is_leading
            assert (await cluster.chain()).is_after_restore
    assert len([each for each in logs if each["event"] == "feed.zookeeper_restored"]) == 1
    await cluster.assert_log_is_right()


@in_virtual_time
async def test_the_log_itself_tells_what_a_restore_undid_if_no_ledger_of_it_is_lost() -> None:
    catalogue = Catalogue(await FeedCluster.start())
    cluster = catalogue.cluster
    async with cluster.leader():
        await cluster.enable()
        for _ in range(3):
            await cluster.create()
        await catalogue.follow()
        backup = cluster.back_up()
        await cluster.delete(1001)
        await cluster.create(1004)
        await catalogue.follow()
    cluster.restore(backup, epochs=1)
    async with cluster.leader():
        await asyncio.sleep(30)

        catalogue.process = ClientProcess()
        await assert_told(catalogue, comparison_count=1)

        assert (await cluster.chain()).generation == 1


@pytest.mark.parametrize("has_new_log", [True, False])
@in_virtual_time
async def test_a_session_that_survives_believes_nothing_that_it_knew(has_new_log: bool) -> None:
    """The machines of ZooKeeper were set back to a snapshot, within a session timeout."""
    settings = FeedSettings(roll_age_s=8 if has_new_log else 3_600)
    catalogue = Catalogue(await FeedCluster.start(settings=settings))
    cluster = catalogue.cluster
    async with cluster.leader(MemoryDisk()) as leader:
        await cluster.enable()
        for _ in range(3):
            await cluster.create()
        following = asyncio.create_task(catalogue.run())
        await asyncio.sleep(10)
        backup, session_id = cluster.back_up(), leader.store.session_id
        await cluster.change(1002)
        await cluster.delete(1001)
        await cluster.create(1004)
        await asyncio.sleep(10)
        assert {1001, 1004} & catalogue.ledger_ids == {1004}

        cluster.restore(backup, epochs=1, sessions_survive=True)
        await asyncio.sleep(60)

        assert leader.is_leading
        assert leader.store.session_id != session_id
        assert catalogue.ledger_ids == cluster.ledgers().keys()
        async with cluster.follower() as follower:
            followed = [each async for each in follower.log.request_checkpoints(0)]
        last = next(
            span
            for checkpoint in followed
            for span in checkpoint.spans
            if span.key == ledger_key(1002)
        )
        assert last.fingerprint == cluster.ledgers()[1002], "it has its old metadata again"
        following.cancel()


@in_virtual_time
async def test_receipts_that_a_slow_client_still_submits_do_not_hide_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its session survives, and it dies before it asks for the next checkpoint."""
    keep_receipts_outside(monkeypatch)
    cluster, slow = await FeedCluster.start(), SlowListener()
    async with cluster.leader():
        await cluster.enable()
        await cluster.create()
        await asyncio.sleep(10)
    backup = cluster.back_up()
    with suppress(FeedChangedError):
        async with opened(cluster, ClientProcess()) as client:
            async with cluster.leader():
                await asyncio.sleep(1)
                await client.service.subscribe(slow)
                for _ in range(2):
                    await cluster.create()
                    await asyncio.sleep(10)
            first, second = slow.received
            client.service.submit_receipt(first.key, first.version)
            await asyncio.sleep(1)
            cluster.restore(backup, epochs=0, sessions_survive=True)
            async with cluster.leader():
                await asyncio.sleep(60)
                client.service.submit_receipt(second.key, second.version)
                await asyncio.sleep(1)

    async with opened(cluster, ClientProcess()) as client:
        assert client.was_reset


class SlowListener:
    """Handles the first change at once, and the next one never."""

    def __init__(self) -> None:
        self.received: list[CommittedVersion] = []

    async def receive(self, committed: CommittedVersion) -> None:
        self.received.append(committed)
        if len(self.received) > 1:
            await asyncio.sleep(3_600)


@EPOCHS
@in_virtual_time
async def test_a_stream_of_spark_knows_it_from_its_offsets(epochs: int) -> None:
    catalogue = Catalogue(await FeedCluster.start())
    cluster = catalogue.cluster
    offsets: list[Offset] = []

    async def end_of_log() -> tuple[Offset, FeedChain]:
        async with cluster.follower() as follower:
            last_id = await follower.log.wait_started()
            chain, log_id = follower.log.chain, follower.log.log_of(last_id)
        offset = Offset(generation=chain.generation, checkpoint=last_id, log=log_id)
        return Offset.parse(offset.to_json()), chain

    follow = catalogue.follow

    async def follow_and_note() -> None:
        await follow()
        offsets.append((await end_of_log())[0])

    catalogue.follow = follow_and_note  # type: ignore[method-assign, assignment]
    async with restored(catalogue, epochs=epochs):
        await cluster.change(1002)
        await asyncio.sleep(30)
        end, chain = await end_of_log()
        start = offsets[-1]
        assert latest_offset(start, end, chain=chain) == end
        with pytest.raises(ChangesLostError, match="restore of ZooKeeper"):
            batch_between(start, end, may_lose=False, chain=chain)

        batch = batch_between(start, end, may_lose=True, chain=chain)
        reader = BatchReader(
            store=cluster.store,
            paths=PATHS,
            manager=cluster.manager,
            bookies=cluster.bookies,
            clock=cluster.clock,
        )
        async with aclosing(reader.read(batch, may_lose=True)) as parts:
            told = {each.ledger_id async for part in parts for each in part}
        assert told >= cluster.ledgers().keys()


# --- Nothing else looks like a restore ------------------------------------------------------------


@in_virtual_time
async def test_ordinary_operations_are_no_restore() -> None:
    """Nodes restart in turn, one is new, one was off while retention deleted all that it knew, and
    the feed is idle, rolls its log, and is disabled and enabled."""
    settings = FeedSettings(roll_bytes=200, base_bytes_min=200, base_factor=0.0)
    catalogue = Catalogue(await FeedCluster.start(settings=settings))
    cluster, disks = catalogue.cluster, [MemoryDisk() for _ in range(3)]
    await cluster.enable(retention_s=60)
    async with cluster.leader(disks[2]):
        await catalogue.follow()
    for day in range(12):
        if day == 6:
            await cluster.disable()
            await cluster.enable(retention_s=60)
        async with cluster.leader(disks[day % 2]), cluster.leader(MemoryDisk()):
            if day % 3:
                await cluster.create()
            await catalogue.follow()
    async with cluster.leader(disks[2]):
        await catalogue.follow()

    chain = await cluster.chain()
    assert (chain.generation, chain.is_after_restore) == (2, False)
    assert catalogue.comparison_count == 2, "for the first and the second feed"
    assert catalogue.ledger_ids == cluster.ledgers().keys()


def chain_of(*logs: tuple[int, int], generation: int = 5) -> FeedChain:
    """``logs``: ledger ids, and the checkpoints after which they begin."""
    segments = tuple(
        Segment(ledger_id=i, kind=Kind.LOG, previous_id=previous_id, begun_ms=10 * i)
        for i, previous_id in logs
    )
    return FeedChain(is_enabled=True, generation=generation, changed_ms=0, segments=segments)


@pytest.mark.parametrize(
    ("now", "version", "is_restored"),
    [
        pytest.param(chain_of((1, 0), (2, 100)), 7, False, id="unchanged"),
        pytest.param(chain_of((1, 0), (2, 100), (3, 100)), 8, False, id="the log goes on"),
        pytest.param(chain_of((1, 0), (3, 100)), 8, False, id="an empty ledger is dropped"),
        pytest.param(chain_of((9, 900)), 90, False, id="retention dropped all"),
        pytest.param(chain_of(generation=6), 8, False, id="a new feed"),
        pytest.param(chain_of(generation=4), 90, True, id="an earlier feed"),
        pytest.param(chain_of((1, 0), (2, 100)), 6, True, id="an earlier version"),
        pytest.param(chain_of((1, 0), (3, 100)), 7, True, id="other content"),
        pytest.param(chain_of((4, 0), (5, 90)), 90, True, id="another log"),
        pytest.param(chain_of(), 90, True, id="no log"),
    ],
)
def test_a_chain_that_cannot_follow_the_known_one_is_from_a_backup(
    now: FeedChain, version: int, is_restored: bool
) -> None:
    known = KnownChain.of(chain_of((1, 0), (2, 100)).to_json(), 7)

    because = known.contradiction(now.to_json(), version)

    assert bool(because) is is_restored


@in_loop
async def test_a_node_keeps_what_it_knows_of_each_cluster_on_its_disk(tmp_path: Path) -> None:
    known = KnownChain(generation=5, znode_version=7, digest="ab")
    await ChainFile(tmp_path / "new", cluster="one").write(known)
    assert await ChainFile(tmp_path / "new", cluster="one").read() == known
    assert await ChainFile(tmp_path / "new", cluster="two").read() is None

    (file,) = (tmp_path / "new").iterdir()
    file.write_text("{")
    with capture_logs() as logs:
        damaged = ChainFile(tmp_path / "new", cluster="one")
        assert await damaged.read() is None
        await damaged.write(known)
        assert await damaged.read() == known
        await ChainFile(file, cluster="one").write(known)
    assert [each["event"] for each in logs] == ["feed.known_chain_unusable"] * 2


@in_virtual_time
async def test_a_later_process_still_fences_the_earlier_after_a_restore() -> None:
    catalogue = Catalogue(await FeedCluster.start())
    async with restored(catalogue, epochs=1):
        later = Catalogue(catalogue.cluster)
        await later.follow()

        with pytest.raises(ClientFencedError):
            async with opened(catalogue.cluster, catalogue.process):
                raise AssertionError
