"""The whole states of a damaged archive can be found and restored."""

from __future__ import annotations

import asyncio
import re
from contextlib import closing
from dataclasses import replace
from socket import socket

import pytest

from archive.format import LATEST, Confirmed, file_name
from archive.reading import Archive, NoSuchPointError
from archive.restore import Clone, RestorePlan, RestoreRefusedError
from daemon.operations.archive_restore import check_bookies, check_unused, verify
from ledgers.errors import CorruptionError, RejectedError
from ledgers.model import BookieId
from ledgers.typed import decode_json
from tests.archive.places import MemoryPlace
from tests.archive.test_archiver import DAMAGE
from tests.archive.test_restore import Lost, archived
from tests.checkpoints.feed_cluster import BOOKIES, ROOT
from tests.virtual_time import run


def nothing(left: int) -> None:
    pass


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("is_last", [True, False])
def test_the_error_names_the_last_state_before_the_damage(damage: str, is_last: bool) -> None:
    async def scenario() -> None:
        cluster = await archived()
        reading = Archive(cluster.place)
        after_base = reading.point().base.number + 1
        name = file_name(reading.numbers()[-1] if is_last else after_base)
        DAMAGE[damage](cluster.place.files, name)

        with pytest.raises(CorruptionError) as caught:
            reading.point(is_exact=False)

        found = re.search("--at 0x([0-9a-f]+)", str(caught.value))
        assert found is not None
        assert list(reading.state(reading.point(checkpoint=int(found[1], 16))))

    run(scenario())


@pytest.mark.parametrize("data", [b"{", b'{"number": 1000000}'])
def test_without_the_last_word_of_the_archiver_only_earlier_states_are_restored(
    data: bytes,
) -> None:
    async def scenario() -> None:
        cluster = await archived()
        reading = Archive(cluster.place)
        end = reading.point(is_exact=False).header.end
        cluster.place.files[LATEST] = data

        with pytest.raises(CorruptionError, match=f"--at {end:#x}"):
            reading.point(is_exact=False)
        assert reading.point(checkpoint=end).header.end <= end

    run(scenario())


def test_a_damaged_base_is_replaced_by_an_earlier_one() -> None:
    async def scenario() -> None:
        cluster = await archived()
        reading = Archive(cluster.place)
        first = reading.point().base
        async with cluster.leader(), cluster.archiver() as archiver:
            archiver.base_ordered_ms = cluster.clock.wall_ms()
            await cluster.clock.sleep(60)
        second, *_ = reading.bases()
        DAMAGE["cut"](cluster.place.files, file_name(second.number))

        assert second.number > first.number
        assert [base.number for base in reading.bases()] == [first.number]

    run(scenario())


def test_an_empty_place_is_no_archive() -> None:
    with pytest.raises(NoSuchPointError):
        verify(Archive(MemoryPlace()), on_left=nothing)


def test_an_archive_whose_files_were_deleted_is_damaged() -> None:
    async def scenario() -> None:
        cluster = await archived()
        for name in cluster.place.files.keys() - {LATEST}:
            del cluster.place.files[name]

        with pytest.raises(CorruptionError):
            verify(Archive(cluster.place), on_left=nothing)

    run(scenario())


def test_an_archive_that_is_written_is_not_forgotten() -> None:
    async def scenario() -> None:
        cluster = await archived()
        latest = decode_json(cluster.place.files[LATEST], Confirmed)

        with pytest.raises(RejectedError, match="a node archives there"):
            check_unused(cluster.place, now_ms=latest.time_ms + 5_000)
        check_unused(cluster.place, now_ms=latest.time_ms + 60_000)

    run(scenario())


def test_a_bookie_that_runs_and_is_not_registered_is_found() -> None:
    async def planned() -> RestorePlan:
        return Lost(await archived()).plan

    plan = run(planned())
    with closing(socket()) as listening, closing(socket()) as stopped:
        for each in (listening, stopped):
            each.bind(("127.0.0.1", 0))
        listening.listen()
        hosts = [f"127.0.0.1:{each.getsockname()[1]}" for each in (listening, stopped)]
        cookies = [f'5\nbookieHost: "{each}"\njournalDir: "j"\n' for each in hosts]
        others = {f"cookies/b{n}": each.encode() for n, each in enumerate(cookies)}
        others["cookies/by-name"] = b"5\n"

        with pytest.raises(RestoreRefusedError, match=r"1 bookie of the archive .* b0\."):
            asyncio.run(check_bookies(replace(plan, others=others)))
        del others["cookies/b0"]
        assert asyncio.run(check_bookies(replace(plan, others=others))) == ["by-name"]


@pytest.mark.parametrize(
    "new", [{BOOKIES[0]: BOOKIES[1]}, {BOOKIES[0]: "other", BOOKIES[1]: "other"}]
)
def test_a_clone_with_wrong_bookies_is_refused(new: dict[str, str]) -> None:
    async def scenario() -> None:
        lost = Lost(await archived())
        bookies = {bookie: BookieId(new.get(bookie, f"new-{bookie}")) for bookie in BOOKIES}

        with pytest.raises(RestoreRefusedError, match="cannot be a bookie of the clone"):
            await lost.restore(clone=Clone(instance_id="cluster-2", bookies=bookies)).run()

    run(scenario())


def test_two_clusters_cannot_use_one_archive() -> None:
    async def scenario() -> None:
        first, second = await archived(), await archived()
        await second.store.set(f"{ROOT}/INSTANCEID", b"cluster-2", version=-1)
        second.place = first.place
        before = dict(first.place.files)

        with pytest.raises(RejectedError, match="another cluster"):
            async with second.leader(), second.archiver():
                await second.clock.sleep(60)

        assert second.place.files == before

    run(scenario())
