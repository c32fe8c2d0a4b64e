"""A node of the last release and one of this tree lead by turns: nothing is forgotten or done
twice, and either side may be rolled back."""

import asyncio
import io
import json
import subprocess
import tarfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from daemon.local.cluster import LocalCluster
from daemon.local.processes import Child
from ledgers.model import BookieId
from replication.marks import marked_ledger_ids
from tests.cluster.beside_java import assert_whole
from tests.cluster.bookies_in_trouble import kill_and_expire
from tests.cluster.commands import bookmender
from tests.cluster.steps import (
    Bench,
    bench,
    errors,
    events,
    leading_pid,
    nodes,
    shape,
    wait_for,
)
from tests.java.tool import JavaTool

pytest_plugins = ["tests.java.fixtures"]
pytestmark = [pytest.mark.cluster, pytest.mark.long(group="matrix"), pytest.mark.timeout(480)]
CLUSTER = {"bookies": 6}

LAST_RELEASE = "7fd5f87f"
"""The commit of the last release."""


@pytest.fixture(scope="module")
def last_release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source tree of the last release, which runs with this environment's libraries."""
    folder = tmp_path_factory.mktemp("last-release")
    repository = Path(__file__).parents[2]
    packed = subprocess.run(
        ["git", "-C", str(repository), "archive", LAST_RELEASE], capture_output=True, check=False
    )
    if packed.returncode:
        pytest.skip(f"{LAST_RELEASE} is not in this clone: git fetch --unshallow gets it")
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder


async def by_bookie(on: Bench, name: str, key: str) -> dict[str, Any]:
    """Return what a record of the leader says about each bookie."""
    data, _ = await on.seen.store.get(f"{on.seen.paths.directory}/bookmender/{name}")
    found: dict[str, Any] = json.loads(data)[key]
    return found


async def remembered(on: Bench) -> dict[str, dict[str, Any]]:
    """Return what a leader must hand over to the next one."""
    absences = await by_bookie(on, "absences", "since_ms")
    drains = await by_bookie(on, "drains", "bookies")
    return {
        "absent since": {bookie: ms // 60_000 for bookie, ms in absences.items()},
        "marked losses": await by_bookie(on, "losses", "bookies"),
        "cookies handled": await by_bookie(on, "identities", "cookies"),
        "drained": {bookie: drain["is_drained"] for bookie, drain in drains.items()},
    }


async def is_remembered(on: Bench, before: dict[str, dict[str, Any]]) -> bool:
    return await remembered(on) == before


async def wait_leads(on: Bench, node: Child) -> None:
    async def leads() -> bool:
        is_leader = await leading_pid(on.seen.store, on.seen.paths) == node.pid
        return is_leader and bool(events(node, "audit.finished"))

    await wait_for(leads, f"leader {node.name} that has audited")


async def end(node: Child) -> None:
    node.terminate()
    assert await asyncio.to_thread(node.wait, timeout_s=30)
    assert not errors(node)


async def test_leadership_moves_between_the_releases(
    module_cluster: LocalCluster, last_release: Path, java: JavaTool, uri: str, tmp_path: Path
) -> None:
    """Old, new, old, new. A reformatted, an absent and a drained bookie are what the first leader
    left them, and the last repairs what the first saw absent."""
    reformatted, absent, drained = module_cluster.bookies[:3]

    async with bench(uri) as on, nodes(uri, tmp_path) as start:
        written = await on.write(*(shape(number) for number in range(24)))
        node = start("first", tree=last_release)
        await wait_leads(on, node)
        await lose_and_reformat(on, module_cluster, reformatted)
        assert (await bookmender(uri, "shell", "lostbookierecoverydelay", "-s", "3600")).out
        await asyncio.to_thread(kill_and_expire, module_cluster, absent)
        said = await bookmender(uri, "bookie", "drain", drained, "--wait")
        assert said.exit_code == 0, said
        await wait_for(lambda: is_recorded(on, absent), "recorded absence")
        before = await remembered(on)
        assert (await bookmender(uri, "feed", "enable")).exit_code == 0
        assert not await told(uri)  # a new client

        for name, tree in (("second", None), ("third", last_release), ("fourth", None)):
            following = start(name, tree=tree)
            await wait_for(partial(events, following, "election.entered"), "vote")
            await end(node)
            node = following
            await wait_leads(on, node)
            # A writer may have chosen the drained bookie since, whose ledger is moved.
            await wait_for(partial(is_remembered, on, before), f"what {name} must know: {before}")
            assert not await marked_ledger_ids(on.seen.store, on.seen.paths)
            more = await on.write(*(shape(number) for number in range(100, 103)))
            written += more
            await wait_told(uri, {each.ledger_id for each in more})
            said = await bookmender(uri, "bookie", "drain", drained, "--wait")
            assert said.exit_code == 0, said  # the writer may have chosen this bookie

        assert (await bookmender(uri, "shell", "lostbookierecoverydelay", "-s", "0")).out
        await on.wait_repaired(written, absent)
        await asyncio.to_thread(assert_whole, java, uri, written)
        await end(node)


async def lose_and_reformat(on: Bench, cluster: LocalCluster, bookie: BookieId) -> None:
    """Kill the bookie, wait for the repair, and start it again without its data."""
    await asyncio.to_thread(kill_and_expire, cluster, bookie)
    await on.wait_repaired(on.workload.written, bookie)
    await asyncio.to_thread(cluster.wipe, bookie)
    before = await by_bookie(on, "identities", "cookies")
    await asyncio.to_thread(cluster.start_bookie, bookie)

    async def is_handled() -> bool:
        now = await by_bookie(on, "identities", "cookies")
        return now.get(bookie) not in (None, before.get(bookie))

    await wait_for(is_handled, "new identity of the reformatted bookie")


async def told(uri: str) -> set[int]:
    """Return the ledgers that the feed tells a client, who acknowledges them."""
    said = await bookmender(uri, "feed", "follow", "--client", "c", "--once", "-o", "json")
    assert said.exit_code == 0, said
    return {json.loads(line)["ledger_id"] for line in said.out.splitlines()}


async def wait_told(uri: str, ledger_ids: set[int]) -> None:
    seen = set[int]()

    async def are_told() -> bool:
        seen.update(await told(uri))
        return ledger_ids <= seen

    await wait_for(are_told, f"changes of the ledgers {ledger_ids}")


async def is_recorded(on: Bench, bookie: BookieId) -> bool:
    return bookie in await by_bookie(on, "absences", "since_ms")
