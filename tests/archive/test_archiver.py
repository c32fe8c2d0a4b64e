"""The archive has the metadata of each exact point as ZooKeeper had it, whatever happens."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from random import Random
from typing import Any

import msgspec
import pytest

import archive.archiver
import archive.format
import archive.reading
from archive.archiver import (
    CHECK_S,
    CONFIRM_S,
    ROUND_S,
    Archiver,
    FeedDisabledError,
)
from archive.format import (
    FILES_OF_PACK,
    PACK_BYTES_MAX,
    FileKind,
    Header,
    Record,
    block_of,
    decode_header,
    decode_records,
    encode_file,
    encode_pack,
    file_name,
    files_of,
    numbers_of,
    pack_name,
)
from archive.places import TakenError, open_place
from archive.reading import Archive, NoSuchPointError
from checkpoints.leader_state import FeedSettings
from daemon.operations.archive_restore import verify
from ledgers.codec.layout import Layout
from ledgers.errors import CorruptionError, UnavailableError
from tests.archive.places import MemoryPlace, at_once
from tests.checkpoints.feed_cluster import PATHS, ROOT, FeedCluster
from tests.memory.store import MemoryStore
from tests.virtual_time import run

Metadata = dict[int, bytes]


class Recorded(FeedCluster):
    """A cluster that records what ZooKeeper had after each transaction."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.place: Any = MemoryPlace()
        self.checks_each_round = False
        self.states: list[tuple[int, Metadata]] = []
        apply = self.tree.apply

        def recorded(*args: Any) -> Any:
            result = apply(*args)
            state = self.present()
            if not self.states or self.states[-1][1] != state:
                self.states.append((self.tree._zxid, state))
            return result

        self.tree.apply = recorded  # type: ignore[method-assign, assignment]

    def present(self) -> Metadata:
        found = {}
        for path, data in self.tree.snapshot().items():
            ledger_id = Layout.HIERARCHICAL.ledger_id(ROOT, path)
            if ledger_id is not None and data:
                found[ledger_id] = data
        return found

    def at(self, zxid: int) -> Metadata:
        return [state for moment, state in self.states if moment <= zxid][-1]

    @asynccontextmanager
    async def archiver(self, **options: Any) -> AsyncIterator[Archiver]:
        """Run an archiver, again after each failure, as a node does."""
        store = MemoryStore(self.tree)

        async def check() -> None:
            """What is said to be restorable is."""
            if self.checks_each_round and archiver.restorable_ms:
                reading = Archive(self.place)
                point = reading.point(is_exact=False)
                restorable_ms = max(point.header.time_ms, reading.confirmed_ms(point))
                confirmed_late_ms = 1000 * (CONFIRM_S + 2 * ROUND_S)
                assert archiver.restorable_ms <= restorable_ms + confirmed_late_ms

        archiver = Archiver(
            store=store,
            manager=self.new_manager(store),
            bookies=self.bookies,
            clock=self.clock,
            place=self.place,
            **options,
            on_round=check,
            in_thread=at_once,
        )

        async def archive() -> None:
            while True:
                with suppress(UnavailableError, FeedDisabledError, CorruptionError):
                    await archiver.run()
                await self.clock.sleep(1)

        task = asyncio.create_task(archive())
        try:
            yield archiver
        finally:
            task.cancel()
            results = await asyncio.gather(task, return_exceptions=True)
            await store.close()
            for error in results:
                if isinstance(error, Exception):
                    raise error

    @classmethod
    async def fed(cls) -> Recorded:
        """Return a cluster whose feed is enabled."""
        cluster = cls()
        await cluster.prepare()
        await cluster.enable()
        return cluster

    async def prepare(self) -> None:
        """Empty checkpoints follow while nothing changes, as while a node archives."""
        await super().prepare()
        await self.store.create(f"{PATHS.feed_watchers}/archive", with_parents=True)

    async def wait_archived(self) -> None:
        """Wait until the newest point has all metadata."""
        async with asyncio.timeout(600):
            while self.archived() != self.present():
                await self.clock.sleep(5)

    def archived(self) -> Metadata | None:
        reading = Archive(self.place)
        try:
            return ledgers_of(reading, reading.point(is_exact=False))
        except (NoSuchPointError, UnavailableError):
            return None


def ledgers_of(reading: Archive, point: Any) -> Metadata:
    found = {}
    for record in reading.state(point):
        if record.ledger_id is not None:
            assert record.data is not None
            found[record.ledger_id] = record.data
    return found


def assert_points_are_right(cluster: Recorded) -> int:
    """Compare each exact point with ZooKeeper at its checkpoint. Return the number of points."""
    reading = Archive(cluster.place, changes_at_once=5)
    numbers = reading.numbers()
    count = 0
    for stored in reading.files(numbers[0], numbers[-1]):
        header = stored.header
        if header.kind is FileKind.PAGE or not header.is_exact or header.begin == header.end:
            continue
        try:
            point = reading.point(checkpoint=header.end)
        except NoSuchPointError:
            continue
        if point.header.end == header.end:
            assert ledgers_of(reading, point) == cluster.at(header.end), header
            count += 1
    return count


async def live(cluster: Recorded, random: Random, steps: int) -> None:
    """Create, change and delete ledgers at random."""
    ids: list[int] = []
    for _ in range(steps):
        action = random.choice(("create", "create", "change", "change", "delete", "wait"))
        if action == "wait" or (action != "create" and not ids):
            await cluster.clock.sleep(random.choice((0.01, 0.3, 2.0)))
        elif action == "create":
            ids.append(await cluster.create())
        elif action == "change":
            await cluster.change(random.choice(ids))
        else:
            await cluster.delete(ids.pop(random.randrange(len(ids))))


@pytest.fixture(autouse=True)
def small_bases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive.archiver, "CHANGES_OF_BASE_LEAST", 30)
    monkeypatch.setattr(archive.archiver, "PAGE_RECORDS", 7)
    monkeypatch.setattr(archive.archiver, "CHANGES_AT_ONCE", 5)
    monkeypatch.setattr(archive.format, "FILES_OF_PACK", 4)
    monkeypatch.setattr(archive.reading, "READS_AT_ONCE", 1)
    monkeypatch.setattr(archive.reading, "SAMPLED", 1)


@pytest.mark.parametrize("seed", range(8))
def test_each_exact_point_is_what_zookeeper_had(seed: int) -> None:
    async def scenario() -> None:
        random = Random(seed)
        cluster = Recorded(seed=seed, settings=FeedSettings(roll_age_s=30))
        await cluster.prepare()
        async with cluster.leader(), cluster.archiver():
            await live(cluster, random, 20)
            await cluster.enable()
            await live(cluster, random, 150)
            await cluster.wait_archived()

        assert assert_points_are_right(cluster) > 0

    run(scenario())


@pytest.mark.parametrize("seed", range(8))
def test_an_archive_goes_on_after_any_failure(seed: int) -> None:
    async def scenario() -> None:
        random = Random(seed)
        cluster = Recorded(seed=seed, settings=FeedSettings(roll_age_s=30))
        await cluster.prepare()
        await cluster.enable()
        cluster.place.fault = lambda method, name: random.random() < 0.05
        async with cluster.leader():
            for _ in range(5):  # each archiver is stopped as by a crash
                async with cluster.archiver():
                    await live(cluster, random, 40)
            cluster.place.fault = lambda method, name: False
            async with cluster.archiver():
                await cluster.wait_archived()

        assert assert_points_are_right(cluster) > 0

    run(scenario())


class KilledError(Exception):
    """The process of the archiver ended here."""


def test_an_archiver_may_be_killed_at_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step is a change of the place, before or after which the process ends."""
    monkeypatch.setattr(archive.archiver, "CHANGES_OF_BASE_LEAST", 6)
    calls = list[str]()

    async def scenario(killed_at: int) -> bool:
        cluster = await Recorded.fed()
        calls.clear()

        def kills(method: str, name: str) -> bool:
            if method not in ("names", "read"):
                calls.append(method)
            if len(calls) > killed_at:
                raise KilledError(method, name)
            return False

        is_killed = False
        cluster.place.fault = kills
        async with cluster.leader():
            try:
                async with cluster.archiver(retention_s=4):
                    await live(cluster, Random(1), 40)
            except KilledError:
                is_killed = True
            cluster.place.fault = lambda method, name: False
            async with cluster.archiver():
                await cluster.wait_archived()
                await cluster.clock.sleep(5)

        assert assert_points_are_right(cluster) > 0
        stored = Archive(cluster.place).stored()
        packs = {block_of(numbers.start) for numbers, _ in stored if len(numbers) > 1}
        singles = {block_of(numbers.start) for numbers, _ in stored if len(numbers) == 1}
        assert not packs & singles
        return is_killed

    killed_at = 0
    while run(scenario(killed_at)):
        killed_at += 1
    assert set(calls) == {"prepare", "create", "created", "replace", "delete"}


@pytest.mark.parametrize("is_first", [True, False], ids=["first base", "later base"])
def test_the_leader_may_change_while_a_base_is_written(
    is_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive.archiver, "PAGE_RECORDS", 2)

    async def scenario() -> None:
        cluster = Recorded()
        await cluster.prepare()
        for _ in range(20):
            await cluster.create()
        leader = cluster.start_leader()
        await cluster.enable()
        async with cluster.leader(), cluster.archiver() as archiver:
            if not is_first:
                await cluster.wait_archived()
            has_begun = asyncio.Event()

            def look(method: str, name: str) -> bool:
                if archiver._writing is not None and archiver._writing.record_count:
                    has_begun.set()
                return False

            cluster.place.fault = look
            living = asyncio.create_task(live(cluster, Random(1), 60))
            await has_begun.wait()
            before = archiver.base
            await cluster.stop_leader(leader)
            await living
            async with asyncio.timeout(600):
                while before is archiver.base:
                    await cluster.clock.sleep(1)
            await cluster.wait_archived()

        assert assert_points_are_right(cluster) > 0

    run(scenario())


def test_quiet_times_leave_no_gap() -> None:
    async def scenario() -> None:
        cluster = Recorded()
        cluster.checks_each_round = True
        await cluster.prepare()
        await cluster.enable()
        async with cluster.leader(), cluster.archiver():
            for quiet_s in (7, 20, 45, 130):
                await cluster.create()
                await cluster.clock.sleep(quiet_s)
            await cluster.wait_archived()

        reading = Archive(cluster.place)
        point = reading.point(is_exact=False)
        assert point.header.number == reading.numbers()[-1]
        assert reading.confirmed_ms(point) >= point.header.time_ms

    run(scenario())


def test_an_archive_begins_again_with_another_feed() -> None:
    async def scenario() -> None:
        cluster = Recorded()
        cluster.checks_each_round = True
        await cluster.prepare()
        await cluster.enable()
        async with cluster.leader(), cluster.archiver() as archiver:
            await live(cluster, Random(1), 30)
            await cluster.wait_archived()
            before = Archive(cluster.place).point()
            kept = ledgers_of(Archive(cluster.place), before)
            await cluster.disable()
            await live(cluster, Random(2), 30)
            await cluster.enable()
            await live(cluster, Random(3), 30)
            await cluster.wait_archived()

        reading = Archive(cluster.place)
        assert reading.point().header.generation > before.header.generation
        assert reading.point(time_ms=before.header.time_ms) == before
        assert ledgers_of(reading, before) == kept
        assert archiver.number == reading.numbers()[-1]

    run(scenario())


def test_a_deleted_archive_is_noticed_and_begins_again_only_on_order() -> None:
    async def scenario() -> None:
        cluster = await Recorded.fed()
        async with cluster.leader():
            async with cluster.archiver() as archiver:
                await cluster.create()
                await cluster.wait_archived()
                archiver.known_number = archiver.number
                cluster.place.files.clear()
                await cluster.clock.sleep(CHECK_S + 5)
                await cluster.create()
                await cluster.clock.sleep(5)
                assert not [name for name in cluster.place.files if name.endswith(".bma")]

            async with cluster.archiver():
                await cluster.wait_archived()

    run(scenario())


@pytest.mark.parametrize("place", ["memory", "s3"])
def test_of_two_archivers_one_ends(place: str, request: pytest.FixtureRequest) -> None:
    async def scenario() -> None:
        cluster = Recorded()
        if place == "s3":
            cluster.place = open_place(request.getfixturevalue("s3").new_url())
        await cluster.prepare()
        await cluster.enable()
        async with cluster.leader(), cluster.archiver():
            await cluster.create()
            await cluster.wait_archived()
            other = MemoryStore(cluster.tree)

            async def nothing() -> None:
                pass

            second = Archiver(
                store=other,
                manager=cluster.new_manager(other),
                bookies=cluster.bookies,
                clock=cluster.clock,
                place=cluster.place,
                on_round=nothing,
                in_thread=at_once,
            )
            living = asyncio.create_task(live(cluster, Random(1), 60))
            with pytest.raises(TakenError):
                await second.run()
            await living
            await cluster.wait_archived()

        assert_points_are_right(cluster)

    run(scenario())


def test_old_files_are_packed_and_nothing_else_changes() -> None:
    async def scenario() -> None:
        cluster = await Recorded.fed()
        written = dict[str, bytes]()
        create = cluster.place.create

        def kept(name: str, data: bytes) -> None:
            create(name, data)
            written[name] = data

        cluster.place.create = kept
        async with cluster.leader(), cluster.archiver() as archiver:
            await live(cluster, Random(1), 300)
            await cluster.wait_archived()

        reading = Archive(cluster.place)
        assert archiver.number > 5 * 4
        assert len(reading.stored()) <= archiver.number / 4 + 2 * 4
        singles = {name: data for name, data in written.items() if len(numbers_of(name)) == 1}
        files = reading.files(1, archiver.number)
        assert [stored.data for stored in files] == [data for _, data in sorted(singles.items())]
        assert assert_points_are_right(cluster) > 10

    run(scenario())


def test_large_files_stay_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive.archiver, "PACK_BYTES_MAX", 0)

    async def scenario() -> None:
        cluster = await Recorded.fed()
        async with cluster.leader(), cluster.archiver() as archiver:
            await live(cluster, Random(1), 100)
            await cluster.wait_archived()

        assert len(Archive(cluster.place).stored()) == archiver.number > 2 * 4

    run(scenario())


def test_a_pack_takes_little_more_memory_than_its_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest pack is written while a node repairs ledgers."""
    monkeypatch.undo()
    place, random = MemoryPlace(), Random(1)
    size_bytes = PACK_BYTES_MAX // FILES_OF_PACK
    header = Header(
        kind=FileKind.PAGE, number=1, previous="", generation=1, begin=0, end=1, time_ms=0
    )
    files = [
        encode_file(
            msgspec.structs.replace(header, number=number),
            [Record(b"key", 1, random.randbytes(size_bytes))],
        )
        for number in files_of(0)
    ]

    tracemalloc.start()
    try:
        place.files[pack_name(0)] = encode_pack(header, files)
        _, write_bytes_max = tracemalloc.get_traced_memory()
        files.clear()
        tracemalloc.reset_peak()
        before_bytes, _ = tracemalloc.get_traced_memory()
        assert Archive(place).file(FILES_OF_PACK).header.number == FILES_OF_PACK
        _, read_bytes_max = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert write_bytes_max < 1.5 * PACK_BYTES_MAX
    assert read_bytes_max - before_bytes < 1.5 * PACK_BYTES_MAX


def test_a_file_beside_its_pack_does_not_count() -> None:
    """Two can leave one: an archiver that is killed, and one that was suspended for long."""

    async def scenario() -> None:
        cluster = await Recorded.fed()
        async with cluster.leader():
            async with cluster.archiver():
                await live(cluster, Random(1), 100)
                await cluster.wait_archived()
            cluster.place.create("000000000003.bma", b"of another writer")
            async with cluster.archiver():
                await live(cluster, Random(1), 10)
                await cluster.wait_archived()

        assert assert_points_are_right(cluster) > 0
        assert "000000000003.bma" not in cluster.place.files

    run(scenario())


def test_points_older_than_the_retention_are_deleted() -> None:
    async def scenario() -> None:
        cluster = await Recorded.fed()
        async with cluster.leader(), cluster.archiver(retention_s=60):
            for _ in range(8):
                await live(cluster, Random(1), 20)
                await cluster.clock.sleep(20)
            await cluster.wait_archived()

        reading = Archive(cluster.place)
        oldest = [*reading.bases()][-1]
        age_s = (cluster.clock.wall_ms() - oldest.time_ms) / 1000
        assert 60 <= age_s < 2 * 60
        assert block_of(reading.numbers()[0]) == block_of(oldest.first_page)
        with pytest.raises(NoSuchPointError, match="begins later, at 20"):
            reading.point(time_ms=oldest.time_ms - 1)

    run(scenario())


def test_other_znodes_are_archived_once_a_minute() -> None:
    async def scenario() -> None:
        cluster = await Recorded.fed()
        await cluster.store.create(f"{ROOT}/cookies/a:3181", b"cookie", with_parents=True)
        await cluster.store.create("/managed-ledgers/topic", b"ids", with_parents=True)
        async with cluster.leader(), cluster.archiver(includes=("/managed-ledgers",)):
            await cluster.clock.sleep(10)
            first = znodes_of(cluster)
            await cluster.store.set(f"{ROOT}/LAYOUT", b"layout", version=-1)
            await cluster.store.delete("/managed-ledgers/topic")
            await cluster.clock.sleep(130)
            await cluster.create()
            await cluster.wait_archived()

        assert first["cookies/a:3181"] == b"cookie"
        assert first["/managed-ledgers/topic"] == b"ids"
        second = znodes_of(cluster)
        assert second["LAYOUT"] == b"layout"
        assert "/managed-ledgers/topic" not in second
        assert {"ids of idgen", "cookies", "/managed-ledgers"} <= second.keys()

    run(scenario())


def znodes_of(cluster: Recorded) -> dict[str, bytes]:
    reading = Archive(cluster.place)
    records = reading.state(reading.point())
    return {r.path: r.data for r in records if r.path is not None and r.data is not None}


DAMAGE: dict[str, Callable[[dict[str, bytes], str], Any]] = {
    "missing": lambda files, name: files.pop(name),
    "cut": lambda files, name: files.update({name: files[name][:-1]}),
    "changed": lambda files, name: files.update({name: files[name][:40] + b"?" + files[name][41:]}),
    "another one": lambda files, name: files.update({name: files[max(files)]}),
    "of another chain": lambda files, name: files.update({name: in_another_chain(files[name])}),
}


def in_another_chain(data: bytes) -> bytes:
    header, _, records = decode_header(data, name="")
    other = msgspec.structs.replace(header, previous="0" * 64)
    return encode_file(other, decode_records(data[records], name=""))


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("is_packed", [True, False])
def test_a_damaged_file_is_named(damage: str, is_packed: bool) -> None:
    if damage == "of another chain" and is_packed:
        return  # a pack is in no chain

    async def scenario() -> None:
        cluster = await Recorded.fed()
        async with cluster.leader(), cluster.archiver() as archiver:
            await live(cluster, Random(1), 100)
            await cluster.wait_archived()
        name = file_name(archiver.number - 1)
        if is_packed:
            name = pack_name(1)
        DAMAGE[damage](cluster.place.files, name)

        with pytest.raises(CorruptionError) as caught:
            verify(Archive(cluster.place), on_left=lambda left: None)
        assert name in str(caught.value.context)

    run(scenario())


def test_an_empty_folder_is_no_archive() -> None:
    with pytest.raises(NoSuchPointError, match="no archive here"):
        Archive(MemoryPlace()).point()


def test_an_ordered_base_is_written_once() -> None:
    async def scenario() -> None:
        cluster = await Recorded.fed()
        async with cluster.leader(), cluster.archiver() as archiver:
            await cluster.create()
            await cluster.wait_archived()
            first = archiver.base
            archiver.base_ordered_ms = cluster.clock.wall_ms()
            await cluster.clock.sleep(30)
            second = archiver.base
            await cluster.clock.sleep(60)

            assert first is not None
            assert second is not None
            assert second.number > first.number
            assert archiver.base == second

    run(scenario())
