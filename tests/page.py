"""What the page of a node shows in Chromium, and whether it agrees with the API."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

from tests.chromium import Tab

IS_LIVE = "document.getElementById('connection').textContent === 'Live'"
SHOWN = """JSON.stringify({
    taken: document.querySelector('#notice time').dateTime,
    health: document.getElementById('word').textContent,
    codes: [...document.querySelectorAll('[data-code]')].map((each) => each.dataset.code),
    counts: Object.fromEntries(
        [...document.querySelectorAll('[data-count][id]')].map((e) => [e.id, +e.dataset.count])),
    blocked: [...document.querySelectorAll('[data-reason]')].map((e) => e.dataset.reason),
    states: [...document.querySelectorAll('[data-state]')].map((e) => e.dataset.state),
})"""
IS_TOO_WIDE = "document.documentElement.scrollWidth > document.documentElement.clientWidth"


async def shown(tab: Tab) -> dict[str, Any]:
    """Return what the page shows. ``taken_ms``: the moment of its state."""
    found: dict[str, Any] = json.loads(await tab.value(SHOWN))
    found["taken_ms"] = round(datetime.fromisoformat(found["taken"]).timestamp() * 1000)
    return found


def differences(page: dict[str, Any], status: dict[str, Any]) -> list[str]:
    """Return how the page differs from the API's status. Both are of the same moment.

    The page reads its list of bookies a moment later, so the list is compared at rest
    (``lists_writable``).
    """
    counts = {name.removeprefix("count-"): count for name, count in page["counts"].items()}
    bookies = status["bookies"]
    states = ("writable", "read_only", "lost", "absent", "reformatted")
    pairs = {
        "health": (page["health"], status["health"]),
        "codes": (page["codes"], [each["code"] for each in status["conditions"]]),
        "queued": (counts["queued"], status["queue"]["total"]),
        "locked": (counts["locked"], status["queue"]["locked"]),
        "waiting": (counts["waiting"], status["waiting"]["count"]),
        **{each: (counts[each.replace("_", "-")], len(bookies[each])) for each in states},
    }
    return [
        f"{name}: the page shows {on_page}, the API says {in_api}"
        for name, (on_page, in_api) in pairs.items()
        if on_page != in_api
    ]


def lists_writable(page: dict[str, Any], status: dict[str, Any]) -> bool:
    """Return True if the page lists as many writable bookies as the API."""
    return bool(page["states"].count("writable") == len(status["bookies"]["writable"]))


async def take_pictures(tab: Tab, folder: Path, moment: str) -> None:
    """Write pictures of the page, for wide and narrow screens."""
    for width in (1280, 390):
        for is_dark in (False, True):
            picture = folder / f"{moment}-{width}-{'dark' if is_dark else 'light'}.png"
            picture.write_bytes(await tab.picture(width=width, is_dark=is_dark))
            assert await tab.value(IS_TOO_WIDE) is False, f"the page is too wide for {width}"
