"""A restore writes a point of an archive, in an order that is safe at each kill point."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest

from archive.format import file_name
from archive.places import Directory
from archive.reading import Archive
from archive.restore import Clone, Restore, RestoreRefusedError, plan_restore
from checkpoints.chain import read_chain
from daemon.operations.archive_restore import compare, forget
from ledgers.codec.layout import Layout, MetadataUri, serialize_layout
from ledgers.errors import BookmenderError, ConflictError, CorruptionError, UnavailableError
from ledgers.manager import LedgerManager
from ledgers.model import BookieId
from replication.orders import OrderStore
from replication.znodes import ClusterPaths
from tests.archive.places import at_once
from tests.archive.test_archiver import DAMAGE, Recorded, ledgers_of, live
from tests.checkpoints.feed_cluster import BOOKIES, PATHS, ROOT
from tests.memory.store import MemoryStore, MemoryTree
from tests.virtual_time import LoopClock, run

URI = MetadataUri.parse("zk://127.0.0.1:2181/ledgers")


async def archived(layout: Layout = Layout.HIERARCHICAL) -> Recorded:
    """Return a cluster whose archive has all its ledgers."""
    cluster = Recorded()
    await cluster.prepare()
    await cluster.store.set(f"{ROOT}/LAYOUT", serialize_layout(layout), version=-1)
    await cluster.store.create(f"{ROOT}/INSTANCEID", b"cluster-1")
    for bookie in BOOKIES:
        await cluster.store.create(f"{ROOT}/cookies/{bookie}", b"cookie", with_parents=True)
    await cluster.enable()
    async with cluster.leader(), cluster.archiver():
        await live(cluster, Random(1), 60)
        await cluster.wait_archived()
    return cluster


class Lost:
    """A ZooKeeper that has lost everything, and the restore into it."""

    def __init__(self, cluster: Recorded) -> None:
        self.archive = Archive(cluster.place)
        self.tree = MemoryTree(clock=LoopClock())
        self.plan = plan_restore(self.archive, self.archive.point())
        self.store = MemoryStore(self.tree)

    def restore(self, **options: Any) -> Restore:
        return Restore(
            store=MemoryStore(self.tree),
            root=ROOT,
            archive=self.archive,
            plan=self.plan,
            clock=LoopClock(),
            in_thread=at_once,
            **options,
        )

    def ledgers(self) -> dict[int, bytes]:
        found = {}
        for path, data in self.tree.snapshot().items():
            ledger_id = self.plan.layout.ledger_id(ROOT, path)
            if ledger_id is not None and data:
                found[ledger_id] = data
        return found


def test_a_restored_cluster_has_everything_but_marks() -> None:
    async def scenario() -> None:
        cluster = await archived()
        lost = Lost(cluster)

        assert not await lost.restore().run()

        assert lost.ledgers() == cluster.present()
        znodes = lost.tree.snapshot()
        for path in ("LAYOUT", "INSTANCEID", *(f"cookies/{b}" for b in BOOKIES)):
            assert znodes[f"{ROOT}/{path}"] == cluster.tree.snapshot()[f"{ROOT}/{path}"]
        assert PATHS.disable in znodes
        manager = await LedgerManager.open(lost.store, URI)
        assert await manager.new_ledger_id() == 2 << 32
        orders = await OrderStore(lost.store, PATHS).read()
        cookie = await lost.store.exists(f"{ROOT}/cookies/{BOOKIES[0]}")
        assert cookie is not None
        assert orders.trusted_cookies[BOOKIES[0]] == cookie.czxid
        chain = (await read_chain(lost.store, PATHS)).value
        assert chain is not None
        assert chain.is_after_restore
        assert chain.generation > lost.plan.point.header.generation

    run(scenario())


@pytest.mark.parametrize("killed_after", [0, 1, 2, 3, 5, 8, 12, 20, 30, 40, 50, 60])
def test_a_killed_restore_lets_no_bookie_start_and_goes_on(killed_after: int) -> None:
    async def scenario() -> None:
        cluster = await archived()
        lost = Lost(cluster)
        count = 0
        apply = lost.tree.apply

        def dies(*args: Any) -> Any:
            nonlocal count
            count += 1
            if count > killed_after:
                raise UnavailableError("killed")
            return apply(*args)

        lost.tree.apply = dies  # type: ignore[method-assign, assignment]
        is_killed = False
        try:
            await lost.restore().run()
        except BookmenderError:
            is_killed = True
        lost.tree.apply = apply  # type: ignore[method-assign]

        if is_killed:
            has_cookies = any("cookies/" in path for path in lost.tree.snapshot())
            assert not has_cookies or lost.ledgers() == cluster.present()
            with pytest.raises(UnavailableError):
                await LedgerManager.open(lost.store, URI)
            await lost.restore().run()
        assert lost.ledgers() == cluster.present()
        await LedgerManager.open(lost.store, URI)

    run(scenario())


def test_a_restore_refuses_what_it_would_damage() -> None:
    async def scenario() -> None:
        cluster = await archived()
        lost = Lost(cluster)

        await lost.store.create(f"{ROOT}/available/{BOOKIES[0]}", with_parents=True)
        with pytest.raises(RestoreRefusedError, match="Stop all bookies first"):
            await lost.restore().run()
        await lost.store.delete(f"{ROOT}/available/{BOOKIES[0]}")
        with pytest.raises(RestoreRefusedError, match="is not empty"):
            await lost.restore().run()
        assert not lost.ledgers()

        other = Lost(cluster)
        paths = ClusterPaths.below(ROOT)
        marker = f"{paths.private.directory}/restoring"
        await other.store.create(marker, b'{"checkpoint":1,"generation":1}', with_parents=True)
        with pytest.raises(RestoreRefusedError, match="another point"):
            await other.restore().run()

    run(scenario())


def test_a_ledger_that_differs_stops_a_restore() -> None:
    async def scenario() -> None:
        cluster = await archived()
        lost = Lost(cluster)
        with suppress(BookmenderError):
            lost.tree.faults = None
            await lost.restore().run()
        ledger_id = next(iter(cluster.present()))
        again = Lost(cluster)
        path = again.plan.layout.path(ROOT, ledger_id)
        end = again.plan.point.header
        marker = b'{"generation":%d,"checkpoint":"%#x"}' % (end.generation, end.end)
        await again.store.create(f"{PATHS.private.directory}/restoring", marker, with_parents=True)
        await again.store.create(path, b"other", with_parents=True)

        with pytest.raises(ConflictError):
            await again.restore().run()

    run(scenario())


@pytest.mark.parametrize("layout", [Layout.FLAT, Layout.LEGACY_HIERARCHICAL])
def test_short_ids_go_on_far_behind(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("archive.restore.SKIPPED_IDS", 3_000)

    async def scenario() -> None:
        cluster = await archived(layout)
        lost = Lost(cluster)

        await lost.restore().run()

        manager = await LedgerManager.open(lost.store, URI)
        assert await manager.new_ledger_id() >= lost.plan.last_ledger_id + 3_000

    run(scenario())


def test_a_clone_names_other_bookies_and_another_cluster() -> None:
    async def scenario() -> None:
        cluster = await archived()
        lost = Lost(cluster)
        bookies = {bookie: BookieId(f"new-{bookie}") for bookie in BOOKIES}

        await lost.restore(clone=Clone(instance_id="cluster-2", bookies=bookies)).run()

        znodes = lost.tree.snapshot()
        assert znodes[f"{ROOT}/INSTANCEID"] == b"cluster-2"
        assert not any("cookies/" in path for path in znodes)
        manager = await LedgerManager.open(lost.store, URI)
        for ledger_id in cluster.present():
            was, now = await cluster.manager.read(ledger_id), await manager.read(ledger_id)
            named = [bookies[b] for b in was.metadata.last_segment.ensemble]
            assert list(now.metadata.last_segment.ensemble) == named

    run(scenario())


def test_a_clone_that_would_name_an_original_bookie_is_refused_at_once() -> None:
    async def scenario() -> None:
        cluster = await archived()
        lost = Lost(cluster)
        some = {bookie: BookieId(f"new-{bookie}") for bookie in BOOKIES[1:]}

        with pytest.raises(RestoreRefusedError, match=BOOKIES[0]):
            await lost.restore(clone=Clone(instance_id="cluster-2", bookies=some)).run()

        assert not lost.tree.snapshot().keys() - MemoryTree(clock=LoopClock()).snapshot().keys()

    run(scenario())


@pytest.mark.parametrize("damage", [each for each in DAMAGE if each != "of another chain"])
def test_a_damaged_archive_is_not_planned(damage: str) -> None:
    async def scenario() -> None:
        cluster = await archived()
        reading = Archive(cluster.place)
        point = reading.point()
        name = file_name(point.base.first_page)
        DAMAGE[damage](cluster.place.files, name)

        with pytest.raises(CorruptionError) as caught:
            plan_restore(reading, point)
        assert caught.value.context["name"] == name

    run(scenario())


def test_an_archive_that_is_damaged_during_a_restore_lets_no_bookie_start() -> None:
    async def scenario() -> None:
        cluster = await archived()
        lost = Lost(cluster)
        name = file_name(lost.plan.point.header.number)
        DAMAGE["cut"](cluster.place.files, name)

        with pytest.raises(CorruptionError) as caught:
            await lost.restore().run()

        assert caught.value.context["name"] == name
        assert not any("cookies/" in path for path in lost.tree.snapshot())
        with pytest.raises(UnavailableError):
            await LedgerManager.open(lost.store, URI)

    run(scenario())


def test_two_restores_of_a_point_at_once_are_as_good_as_one() -> None:
    async def scenario() -> None:
        cluster = await archived()
        lost = Lost(cluster)

        await asyncio.gather(lost.restore().run(), lost.restore().run())

        assert lost.ledgers() == cluster.present()
        await LedgerManager.open(lost.store, URI)

    run(scenario())


def test_of_two_restores_of_different_points_at_once_one_is_refused() -> None:
    async def scenario() -> None:
        cluster = await archived()
        lost, earlier = Lost(cluster), Lost(cluster)
        base = earlier.plan.point.base
        earlier.tree = lost.tree
        earlier.plan = plan_restore(earlier.archive, earlier.archive.point(checkpoint=base.end))

        results = await asyncio.gather(
            lost.restore().run(), earlier.restore().run(), return_exceptions=True
        )

        assert [type(each) for each in results] == [bool, RestoreRefusedError]
        assert lost.ledgers() == cluster.present()

    run(scenario())


def test_two_points_are_compared() -> None:
    async def scenario() -> None:
        cluster = await archived()
        reading = Archive(cluster.place)
        last = reading.point()
        first = reading.point(checkpoint=last.base.end)
        was, now = ledgers_of(reading, first), ledgers_of(reading, last)

        found = compare(reading, first, last)

        changes = {each.ledger_id: each.change for each in found.ledgers}
        expected = dict.fromkeys(now.keys() - was.keys(), "created")
        expected |= dict.fromkeys(was.keys() - now.keys(), "deleted")
        expected |= {i: "changed" for i in was.keys() & now.keys() if was[i] != now[i]}
        assert expected
        assert changes == expected

    run(scenario())


def test_only_the_files_of_an_archive_are_forgotten(tmp_path: Path) -> None:
    place = Directory(tmp_path)
    for name in ("000000000001.bma", "latest.json", "other"):
        place.create(name, b"")

    assert forget(place) == 1
    assert place.names() == ["other"]
