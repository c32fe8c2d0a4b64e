"""The page for people in headless Chromium, also during a real repair."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from daemon.local.cluster import LocalCluster
from replication.znodes import vote_to_bytes
from tests.chromium import Tab, chromium
from tests.cluster.bookies_in_trouble import kill_and_expire
from tests.cluster.steps import bench, errors, shape, wait_for
from tests.cluster.test_http import read, serving_node
from tests.daemon.http.serving import Client, serving
from tests.daemon.http.test_api import trouble
from tests.fsck.browser import NAMES
from tests.page import IS_LIVE, differences, lists_writable, shown, take_pictures
from tests.replication.cluster import Cluster
from tests.replication.nodes import PATHS

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.long(group="http"),
    pytest.mark.timeout(360),
    pytest.mark.skipif(
        not any(map(shutil.which, NAMES)),
        reason="Chromium is not installed (Debian: apt install chromium)",
    ),
]

SLOW = {"REPLICATION_ENTRIES_PER_S": "40"}
"""So that the repair lasts for a while."""


async def paints_ms(tab: Tab) -> float:
    script = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
    return float(await tab.wait_for(script))


def test_the_page_shows_the_numbers_of_the_api_during_a_repair(
    module_cluster: LocalCluster, uri: str, tmp_path: Path
) -> None:
    victim = module_cluster.bookies[0]

    async def run() -> None:
        async with (
            bench(uri) as on,
            serving_node(uri, tmp_path, **SLOW) as (node, base),
            chromium() as tab,
        ):
            written = await on.write(*(shape(number) for number in range(120)))
            await tab.open(f"{base}/")
            print(f"first paint after {await paints_ms(tab):.0f} ms")
            await tab.wait_for(IS_LIVE)
            kill_and_expire(module_cluster, victim)
            repairing = asyncio.create_task(on.wait_repaired(written, victim))
            queued: list[int] = []
            has_pictures = False
            try:
                while not repairing.done():
                    status, page = await read(base, "status"), await shown(tab)
                    if page["taken_ms"] == status["taken_ms"]:
                        assert differences(page, status) == []
                        queued.append(page["counts"]["count-queued"])
                        if 0 < queued[-1] < max(queued) and not has_pictures:
                            await take_pictures(tab, tmp_path, "during")
                            has_pictures = True
                    await asyncio.sleep(0.1)
                await repairing
                assert len({count for count in queued if count}) >= 2, queued
                await tab.wait_for("document.querySelector('#count-queued').dataset.count === '0'")
                assert await tab.value("document.querySelectorAll('#queue svg path.line').length")
                nodes = await tab.value("document.getElementById('nodes').textContent")
                assert f"{node.pid}auditor (leads), worker" in nodes
                await take_pictures(tab, tmp_path, "after")
                print(f"pictures: {tmp_path}")
            finally:
                await asyncio.to_thread(module_cluster.start_bookie, victim)
            await tab.wait_for("document.querySelector('#count-lost').dataset.count === '0'")

            async def are_all_listed() -> bool:
                return lists_writable(await shown(tab), await read(base, "status"))

            await wait_for(are_all_listed, "list of all bookies")
            await on.assert_whole(written)
            assert tab.errors == []
            assert not errors(node)

    asyncio.run(run())


# --- On a cluster in memory -----------------------------------------------------------------------


@asynccontextmanager
async def opened() -> AsyncIterator[tuple[Tab, Client, Cluster]]:
    """A page of a cluster in trouble, once it is live."""
    cluster = await Cluster.start()
    await trouble(cluster)
    async with serving(cluster) as client, chromium() as tab:
        await tab.open(str(client.make_url("/")))
        await tab.wait_for(IS_LIVE)
        yield tab, client, cluster


def test_folds_and_the_focus_survive_an_update() -> None:
    """The hold's condition says for how long it has lasted, so this section changes."""
    fold = "document.querySelector('#health details')"

    async def run() -> None:
        async with opened() as (tab, _, _):
            await tab.wait_for(f"{fold} !== null")
            await tab.value(f"{fold}.querySelector('summary').focus(); {fold}.open = true")
            await tab.value(f"{fold}.isOld = true")
            await tab.wait_for(f"!{fold}.isOld")
            assert await tab.value(f"{fold}.open")
            assert await tab.value(f"document.activeElement.parentNode === {fold}")

    asyncio.run(run())


def test_a_foreign_name_runs_no_script() -> None:
    evil = "<img src=x onerror=document.body.replaceChildren()>"

    async def run() -> None:
        async with opened() as (tab, _, cluster):
            vote = f"{PATHS.election}/V_0000000003"
            await cluster.store.set(vote, vote_to_bytes(evil), version=-1)
            await tab.wait_for("document.getElementById('leader')?.textContent.includes('<img')")
            assert await tab.value("document.querySelectorAll('img').length") == 0
            assert await tab.value(IS_LIVE)
            assert tab.errors == []

    asyncio.run(run())


def test_a_page_without_its_node_says_so() -> None:
    told = "document.getElementById('connection').textContent"

    async def run() -> None:
        async with opened() as (tab, client, _):
            await client.server.close()
            await tab.wait_for(f"{told}.startsWith('Not connected to the node. This is the state')")
            assert await tab.value("document.getElementById('word').textContent") == "WARN"

    asyncio.run(run())


def test_without_scripts_the_page_is_complete() -> None:
    async def run() -> None:
        cluster = await Cluster.start()
        await trouble(cluster)
        async with serving(cluster) as client, chromium() as tab:
            await tab.call("Emulation.setScriptExecutionDisabled", value=True)
            await tab.open(str(client.make_url("/")))
            await tab.wait_for("!!document.querySelector('#count-queued')")
            assert (await shown(tab))["counts"]["count-queued"] == 5

    asyncio.run(run())
