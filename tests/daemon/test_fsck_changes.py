"""``fsck run --changed`` as a client of the feed, on a cluster in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Container
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from auditor.fsck.options import FeedChanges, Level
from auditor.fsck.results.folder import (
    ClientPosition,
    keep_position,
    read_positions,
)
from checkpoints.chain import FeedChain, Kind, Segment
from checkpoints.client import ClusterConnection
from checkpoints.stores.zookeeper import ZooKeeperReceiptStore
from daemon.fsck import changes as changes_module
from daemon.fsck.changes import (
    Fetched,
    WhyWhole,
    acknowledge,
    client_name,
    fetch_changes,
    why_whole,
)
from ledgers.errors import SettingsError, UnavailableError
from tests.checkpoints.feed_cluster import ROOT, FeedCluster
from tests.daemon.feeds import feed, pass_time
from tests.memory.store import MemoryStore
from tests.replication.cluster import in_virtual_time
from tests.replication.nodes import PATHS

LEVEL = Level.ENDS
NAME = client_name(LEVEL)
LOG = (7, 1_000, 0)


class Folder:
    """A folder of results, and the runs that write there."""

    def __init__(self, cluster: FeedCluster, state: Path, *, client: str = NAME) -> None:
        self._cluster, self.state, self._client = cluster, state, client

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[ClusterConnection]:
        store = MemoryStore(self._cluster.tree)
        try:
            manager = self._cluster.new_manager(store)
            yield ClusterConnection(store=store, manager=manager, root=ROOT)
        finally:
            await store.close()

    async def fetch(self, level: Level = LEVEL) -> Fetched:
        async with self.connection() as connection:
            return await fetch_changes(
                connection,
                client=self._client,
                level=level,
                state=self.state,
                clock=self._cluster.clock,
                bookies=self._cluster.bookies,
            )

    async def acknowledge(
        self, changes: FeedChanges | None, *, unanswered: Container[int] = ()
    ) -> WhyWhole | None:
        assert changes is not None
        if changes.is_whole:  # the run has done this at its end
            begin = ClientPosition(
                level=LEVEL, generation=changes.generation, position=changes.position
            )
            keep_position(self.state, self._client, begin)
        async with self.connection() as connection:
            return await acknowledge(
                connection,
                changes,
                level=LEVEL,
                state=self.state,
                unanswered=unanswered,
                clock=self._cluster.clock,
                bookies=self._cluster.bookies,
            )

    async def run(self) -> Fetched:
        """Fetch, check, and acknowledge."""
        fetched = await self.fetch()
        assert await self.acknowledge(fetched.changes) is None
        return fetched


def told(fetched: Fetched) -> dict[int, bool]:
    """Return the changed ledgers, and whether each is deleted."""
    assert fetched.why is None
    assert fetched.changes is not None
    return dict(
        zip(fetched.changes.ledger_ids, map(bool, fetched.changes.are_deleted), strict=True)
    )


@in_virtual_time
async def test_the_first_run_checks_all_ledgers_and_the_next_one_what_changed(
    tmp_path: Path,
) -> None:
    async with feed(3) as (cluster, _):
        folder = Folder(cluster, tmp_path)

        first = await folder.run()
        assert first.why is WhyWhole.FIRST
        assert told(await folder.run()) == {}
        await cluster.change(1001)
        await cluster.change(1001)
        await cluster.delete(1002)
        await cluster.create(1010)
        await pass_time()

        assert told(await folder.run()) == {1001: False, 1002: True, 1010: False}
        assert told(await folder.run()) == {}


@in_virtual_time
async def test_changes_during_the_first_run_are_told_to_the_next(tmp_path: Path) -> None:
    async with feed(3) as (cluster, _):
        folder = Folder(cluster, tmp_path)
        first = await folder.fetch()
        await cluster.change(1001)
        await pass_time()
        await folder.acknowledge(first.changes)

        assert told(await folder.fetch()) == {1001: False}


@in_virtual_time
async def test_a_run_that_dies_is_told_the_same_again(tmp_path: Path) -> None:
    async with feed(3) as (cluster, _):
        folder = Folder(cluster, tmp_path)
        assert (await folder.fetch()).why is WhyWhole.FIRST  # dies
        assert (await folder.run()).why is WhyWhole.FIRST
        await cluster.change(1001)
        await pass_time()
        assert told(await folder.fetch()) == {1001: False}  # dies
        await cluster.change(1002)
        await pass_time()

        assert told(await folder.fetch()) == {1001: False, 1002: False}


@in_virtual_time
async def test_a_change_during_a_run_is_told_to_the_next(tmp_path: Path) -> None:
    async with feed(3) as (cluster, _):
        folder = Folder(cluster, tmp_path)
        await folder.run()
        await cluster.change(1001)
        await cluster.change(1002)
        await pass_time()
        fetched = await folder.fetch()
        await cluster.change(1001)  # after it was checked
        await pass_time()
        assert await folder.acknowledge(fetched.changes) is None

        assert told(await folder.run()) == {1001: False}
        assert told(await folder.run()) == {}


@in_virtual_time
async def test_a_ledger_that_could_not_be_checked_is_told_again(tmp_path: Path) -> None:
    async with feed(3) as (cluster, _):
        folder = Folder(cluster, tmp_path)
        await folder.run()
        for ledger_id in (1001, 1002, 1003):
            await cluster.change(ledger_id)
            await pass_time()  # a checkpoint each
        fetched = await folder.fetch()
        await folder.acknowledge(fetched.changes, unanswered={1002})

        assert told(await folder.run()) == {1002: False}
        assert told(await folder.run()) == {}


@in_virtual_time
async def test_receipts_that_could_not_be_stored_follow_from_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with feed(3) as (cluster, _):
        folder = Folder(cluster, tmp_path)
        first = await folder.fetch()
        with monkeypatch.context() as patched:
            patched.setattr(changes_module, "open_client_in", unavailable)
            with pytest.raises(UnavailableError):
                await folder.acknowledge(first.changes)
        await cluster.change(1001)
        await pass_time()

        assert told(await folder.run()) == {1001: False}


@asynccontextmanager
async def unavailable(*args: object, **kwargs: object) -> AsyncIterator[None]:
    raise UnavailableError("no answer")
    yield


@in_virtual_time
async def test_two_folders_with_one_client_miss_nothing(tmp_path: Path) -> None:
    async with feed(3) as (cluster, _):
        folder, other = Folder(cluster, tmp_path / "a"), Folder(cluster, tmp_path / "b")
        await folder.run()
        await cluster.change(1001)
        await pass_time()
        fetched = await folder.fetch()
        assert (await other.run()).why is WhyWhole.FIRST

        assert await folder.acknowledge(fetched.changes) is WhyWhole.OTHER_FOLDER
        assert (await folder.fetch()).why is WhyWhole.OTHER_FOLDER


@in_virtual_time
async def test_after_a_new_feed_all_ledgers_are_checked(tmp_path: Path) -> None:
    async with feed(3) as (cluster, _):
        folder = Folder(cluster, tmp_path)
        await folder.run()
        fetched = await folder.fetch()
        await cluster.disable()
        with pytest.raises(SettingsError, match="bookmender feed enable"):
            await folder.fetch()
        await cluster.enable()
        await pass_time()

        assert await folder.acknowledge(fetched.changes) is WhyWhole.NEW_FEED
        assert (await folder.run()).why is WhyWhole.NEW_FEED
        assert told(await folder.run()) == {}


@in_virtual_time
async def test_what_the_log_has_deleted_makes_a_run_check_all_ledgers(tmp_path: Path) -> None:
    async with feed(3) as (cluster, _):
        folder = Folder(cluster, tmp_path)
        await folder.run()
        positions = read_positions(tmp_path)
        oldest = (await cluster.chain()).logs[0].previous_id
        earlier = ClientPosition(
            level=LEVEL, generation=positions[NAME].generation, position=oldest - 1
        )
        keep_position(tmp_path, NAME, earlier)
        await cluster.store.delete(f"{PATHS.feed_clients}/{NAME}")

        assert (await folder.fetch()).why is WhyWhole.RETENTION


@in_virtual_time
async def test_the_receipts_are_those_of_a_client_of_the_feed(tmp_path: Path) -> None:
    async with feed(3) as (cluster, _):
        folder = Folder(cluster, tmp_path)
        fetched = await folder.run()
        assert fetched.changes is not None

        store = await ZooKeeperReceiptStore.open(
            cluster.store,
            folder=PATHS.feed_clients,
            client=NAME,
            generation=fetched.changes.generation,
        )
        assert await store.get_low_watermark() == fetched.changes.position


@pytest.mark.parametrize("epochs", [0, 1], ids=["standalone", "an ensemble"])
@in_virtual_time
async def test_after_a_restore_of_zookeeper_all_ledgers_are_checked(
    tmp_path: Path, epochs: int
) -> None:
    """The folder is not restored. Zxids go back, or jump to the next epoch."""
    async with feed(3) as (cluster, _):
        folder = Folder(cluster, tmp_path)
        await folder.run()
    backup = cluster.back_up()
    async with cluster.leader():
        await cluster.change(1002)
        await pass_time()
        assert told(await folder.run()).keys() >= {1002}
        during = await folder.fetch()
    cluster.restore(backup, epochs=epochs)

    async with cluster.leader():
        await pass_time()
        for _ in range(12):  # zxids pass the position of the folder
            await cluster.change(1003)
            await pass_time()

        assert await folder.acknowledge(during.changes) is WhyWhole.RESTORED
        assert (await folder.run()).why is WhyWhole.RESTORED
        assert told(await folder.run()) == {}


def position(**changes: object) -> ClientPosition:
    known = {"level": LEVEL, "generation": 1, "position": 100}
    return ClientPosition(**{**known, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("known", "stored", "why"),
    [
        pytest.param(None, None, WhyWhole.FIRST, id="the first run"),
        pytest.param(None, 100, WhyWhole.FIRST, id="another folder ran before"),
        pytest.param(position(), 100, None, id="as it was left"),
        pytest.param(position(), 90, None, id="a run died before its receipts were stored"),
        pytest.param(position(), None, None, id="a first run died before that"),
        pytest.param(position(), 101, WhyWhole.OTHER_FOLDER, id="another folder ran since"),
        pytest.param(position(generation=2), None, WhyWhole.NEW_FEED, id="another feed"),
        pytest.param(position(level=Level.FULL), 100, WhyWhole.OTHER_LEVEL, id="another level"),
        pytest.param(position(log=LOG), 100, None, id="the same log"),
        pytest.param(position(log=(7, 2_000, 0)), 100, WhyWhole.RESTORED, id="another log"),
        pytest.param(position(position=111), 100, WhyWhole.RESTORED, id="beyond the end"),
    ],
)
def test_a_run_checks_all_ledgers_if_the_changes_do_not_suffice(
    known: ClientPosition | None, stored: int | None, why: WhyWhole | None
) -> None:
    logs = (Segment(ledger_id=7, kind=Kind.LOG, previous_id=0, begun_ms=1_000),)
    chain = FeedChain(is_enabled=True, generation=1, changed_ms=0, segments=logs)

    assert why_whole(known, level=LEVEL, chain=chain, end=110, stored=stored) is why


@pytest.mark.parametrize(
    "text",
    [
        pytest.param('{"fsck-ends": {"level": "deep"}}', id="an unknown level"),
        pytest.param("[" * 100_000, id="deep nesting"),
    ],
)
def test_unreadable_positions_are_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "clients.json").write_text(text)

    assert read_positions(tmp_path) == {}


def test_each_reason_has_a_sentence() -> None:
    whole = FeedChanges(client=NAME, generation=1, position=16, is_whole=True)
    for why in WhyWhole:
        first, second = Fetched(changes=whole, why=why).notes()
        assert why.text(NAME) in first
        assert second.endswith("after checkpoint 0x10")
    assert "its own --client" in WhyWhole.OTHER_FOLDER.text(NAME)
    assert NAME in WhyWhole.OTHER_FOLDER.text(NAME)
