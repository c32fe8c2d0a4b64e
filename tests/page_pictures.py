"""Takes pictures of the page with canned answers: ``python -m tests.page_pictures FOLDER [NAME…]``.

The pictures of docs/pictures are made by ``python -m tests.page_pictures docs/pictures --docs``.
"""

import argparse
import asyncio
from collections.abc import Callable
from pathlib import Path

from tests import page_scenes as scenes
from tests.chromium import Tab, chromium
from tests.page_scenes import Scene, served

SCENES: dict[str, Callable[[], Scene]] = {
    "whole": scenes.whole,
    "one-lost": scenes.one_lost,
    "repaired": scenes.repaired,
    "rack-lost": scenes.rack_lost,
    "five": lambda: scenes.one_lost(5, 0),
    "many": lambda: scenes.one_lost(500, 10),
    "stale": scenes.one_lost,
    "never": scenes.whole,
}
SIZES = {"wide": 1180, "phone": 360}


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    for name, make in SCENES.items():
        if given.names and name not in given.names:
            continue
        scene = make()
        if name == "never":
            scene.error = "ZooKeeper at 10.0.0.1:2181 accepts connections but does not answer"
        async with served(scene) as address, chromium() as tab:
            await tab.call(
                "Emulation.setDeviceMetricsOverride",
                width=1180,
                height=900,
                deviceScaleFactor=1,
                mobile=False,
            )
            await tab.open(address)
            if name != "never":
                await tab.wait_for("!!document.querySelector('.tile')")
            if name == "stale":
                scene.error = "ZooKeeper at 10.0.0.1:2181 accepts connections but does not answer"
                await tab.wait_for(
                    "document.querySelector('[data-stale]') && document.querySelector('h1').textContent.includes('12 s')"
                )
            await _take(tab, given.folder, name)
            print(name, tab.errors)


async def _take(tab: Tab, folder: Path, name: str) -> None:
    for size, width in SIZES.items():
        for scheme in ("light", "dark"):
            picture = await tab.picture(width=width, is_dark=scheme == "dark")
            (folder / f"{name}-{size}-{scheme}.png").write_bytes(picture)
            await asyncio.sleep(0.1)


if __name__ == "__main__":
    asyncio.run(main())
