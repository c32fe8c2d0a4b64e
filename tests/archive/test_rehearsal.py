"""A rehearsal restores an archive into a scratch ZooKeeper, and compares every byte."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from archive.places import Directory
from daemon.operations.archive_rehearsal import compare_all
from tests.archive.test_archiver import Recorded
from tests.archive.test_restore import Lost, archived
from tests.checkpoints.feed_cluster import BOOKIES, ROOT
from tests.cluster.commands import bookmender
from tests.virtual_time import run


@pytest.mark.parametrize("change", ["none", "ledger", "missing ledger", "LAYOUT", "cookie"])
def test_what_differs_from_the_archive_is_named(change: str) -> None:
    async def scenario() -> None:
        cluster = await archived()
        lost = Lost(cluster)
        await lost.restore().run()
        ledger_id = min(cluster.present())
        path = lost.plan.layout.path(ROOT, ledger_id)
        expected = {
            "none": [],
            "LAYOUT": ["LAYOUT"],
            "cookie": [f"cookies/{BOOKIES[0]}"],
        }.get(change, [f"ledger {ledger_id}"])
        match change:
            case "ledger":
                await lost.store.set(path, b"other", version=-1)
            case "missing ledger":
                await lost.store.delete(path)
            case "LAYOUT":
                await lost.store.set(f"{ROOT}/LAYOUT", b"other", version=-1)
            case "cookie":
                await lost.store.delete(f"{ROOT}/cookies/{BOOKIES[0]}")

        assert await compare_all(lost.store, lost.archive, lost.plan) == expected

    run(scenario())


@pytest.mark.cluster
def test_an_archive_is_rehearsed_on_a_real_zookeeper(tmp_path: Path) -> None:
    place = Directory(tmp_path)
    cluster: Recorded = run(archived())
    for name, data in cluster.place.files.items():
        place.create(name, data)

    command = ("archive", "verify", "--rehearse", "--from", f"file://{tmp_path}", "-o", "json")
    said = asyncio.run(bookmender(None, *command))

    assert said.exit_code == 0, said.err
    rehearsal = said.record["rehearsal"]
    assert rehearsal["different"] == []
    assert rehearsal["ledger_count"] == len(cluster.present()) > 0
    assert rehearsal["cookie_count"] == len(BOOKIES)
