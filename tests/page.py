"""What the page of a node shows in Chromium, and whether it agrees with the API."""

import json
from pathlib import Path
from typing import Any

from tests.chromium import Tab

IS_LIVE = "!!document.querySelector('#state[data-taken]:not([data-stale])')"
SHOWN = """JSON.stringify({
    taken_ms: +document.getElementById('state').dataset.taken,
    health: document.getElementById('word').textContent,
    codes: [...document.querySelectorAll('[data-code]')].map((each) => each.dataset.code),
    queued: +document.getElementById('state').dataset.queued,
    states: [...document.querySelectorAll('[data-state]')].map((each) => each.dataset.state),
})"""
IS_TOO_WIDE = "document.documentElement.scrollWidth > document.documentElement.clientWidth"


async def shown(tab: Tab) -> dict[str, Any]:
    """Return what the page shows. ``taken_ms``: the moment of its state."""
    found: dict[str, Any] = json.loads(await tab.value(SHOWN))
    return found


def differences(page: dict[str, Any], status: dict[str, Any]) -> list[str]:
    """Return how the page differs from the API's status. Both are of the same moment.

    The page reads its list of bookies a moment later, so the list is compared at rest
    (``lists_bookies``).
    """
    pairs = {
        "health": (page["health"], status["health"]),
        "codes": (page["codes"], [each["code"] for each in status["conditions"]]),
        "queued": (page["queued"], status["queue"]["total"]),
    }
    return [
        f"{name}: the page shows {on_page}, the API says {in_api}"
        for name, (on_page, in_api) in pairs.items()
        if on_page != in_api
    ]


def lists_bookies(page: dict[str, Any], status: dict[str, Any]) -> bool:
    """Return True if the page has as many tiles of each state as the API has bookies."""
    counts = {state: page["states"].count(state) for state in ("writable", "lost", "absent")}
    return counts == {state: len(status["bookies"][state]) for state in counts}


async def take_pictures(tab: Tab, folder: Path, moment: str) -> None:
    """Write pictures of the page, for wide and narrow screens."""
    for width in (1180, 360):
        for is_dark in (False, True):
            picture = folder / f"{moment}-{width}-{'dark' if is_dark else 'light'}.png"
            picture.write_bytes(await tab.picture(width=width, is_dark=is_dark))
            assert await tab.value(IS_TOO_WIDE) is False, f"the page is too wide for {width}"
