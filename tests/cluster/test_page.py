"""The page for people in headless Chromium during a real repair."""

import asyncio
import shutil
from pathlib import Path

import pytest

from daemon.local.cluster import LocalCluster
from tests.chromium import Tab, chromium
from tests.cluster.bookies_in_trouble import kill_and_expire
from tests.cluster.steps import bench, errors, shape, wait_for
from tests.cluster.test_http import read, serving_node
from tests.fsck.browser import NAMES
from tests.page import IS_LIVE, differences, lists_bookies, shown, take_pictures

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
                        queued.append(page["queued"])
                        if 0 < queued[-1] < max(queued) and not has_pictures:
                            await take_pictures(tab, tmp_path, "during")
                            has_pictures = True
                    await asyncio.sleep(0.1)
                await repairing
                assert len({count for count in queued if count}) >= 2, queued
                await tab.wait_for("document.querySelector('#state').dataset.queued === '0'")
                parts = await tab.value("document.getElementById('parts').textContent")
                assert f"(pid {node.pid}) this node: auditor, worker" in parts
                await take_pictures(tab, tmp_path, "after")
                print(f"pictures: {tmp_path}")
            finally:
                await asyncio.to_thread(module_cluster.start_bookie, victim)

            async def are_all_listed() -> bool:
                return lists_bookies(await shown(tab), await read(base, "status"))

            await wait_for(are_all_listed, "list of all bookies")
            await on.assert_whole(written)
            assert tab.errors == []
            assert not errors(node)

    asyncio.run(run())
