"""Takes pictures of the page with canned answers.

``python -m tests.page_pictures build/pictures`` shows every scene, wide and narrow, light and dark.
``python -m tests.page_pictures --docs docs/pictures`` takes those of the documents.
"""

import argparse
import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests import page_scenes as scenes
from tests.chromium import Tab, chromium
from tests.page_scenes import Scene, served

FROZEN = "ZooKeeper at 10.0.0.1:2181 accepts connections but does not answer"
STALE_FOR = "document.querySelector('h1').textContent.includes('for 12 s')"
SCENES: dict[str, Callable[[], Scene]] = {
    "whole": scenes.whole,
    "repair": scenes.one_lost,
    "repaired": scenes.repaired,
    "rack": scenes.rack_lost,
    "five": lambda: scenes.one_lost(5, 0),
    "many": scenes.many,
    "frozen": scenes.whole,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A picture of a scene. ``height``: None: of the whole page."""

    scene: str
    width: int = 1180
    height: int | None = None
    is_dark: bool = False

    @property
    def name(self) -> str:
        return f"{self.scene}-{self.width}-{'dark' if self.is_dark else 'light'}.png"


ALL = tuple(
    Picture(scene=scene, width=width, is_dark=is_dark)
    for scene in SCENES
    for width in (1180, 360)
    for is_dark in (False, True)
)
DOCS = (
    Picture(scene="whole", height=640),
    Picture(scene="repair", height=1010),
    Picture(scene="rack", height=900, is_dark=True),
    Picture(scene="frozen", height=250),
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.page_pictures")
    parser.add_argument("--docs", action="store_true", help="only the pictures of the documents")
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    asyncio.run(_take(DOCS if given.docs else ALL, given.folder))


async def _take(pictures: tuple[Picture, ...], folder: Path) -> None:
    async with chromium() as tab:
        for name in dict.fromkeys(each.scene for each in pictures):
            scene = SCENES[name]()
            async with served(scene) as address:
                await tab.call("Emulation.setScrollbarsHidden", hidden=True)
                await tab.open(address)
                await tab.wait_for("!!document.querySelector('.tile')")
                if name == "frozen":
                    scene.error = FROZEN
                    await tab.wait_for(STALE_FOR)
                for each in pictures:
                    if each.scene == name:
                        await _write(tab, each, folder)


async def _write(tab: Tab, picture: Picture, folder: Path) -> None:
    await tab.resize(width=picture.width, is_dark=picture.is_dark)
    # The curve is drawn for the new width, and a state is as new as it can be.
    await tab.value("document.querySelector('[data-stale]') ? draw() : poll()")
    taken = await tab.picture(width=picture.width, height=picture.height, is_dark=picture.is_dark)
    (folder / picture.name).write_bytes(taken)


if __name__ == "__main__":
    main()
