"""The script of the page in headless Chromium, with canned answers of the API."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Any

import pytest

from tests import page_scenes as scenes
from tests.chromium import Tab, chromium
from tests.fsck.browser import NAMES
from tests.page_scenes import Scene, parts, served

pytestmark = [
    pytest.mark.long(group="http"),
    pytest.mark.timeout(180),
    pytest.mark.skipif(
        not any(map(shutil.which, NAMES)),
        reason="Chromium is not installed (Debian: apt install chromium)",
    ),
]

FROZEN = "ZooKeeper at zk:2181 accepts connections but does not answer"
HEAD = "document.querySelector('#state').innerText"
HUE = "document.querySelector('#state').className"
AXE = """axe.run(document, {resultTypes: ['violations']}).then((found) => JSON.stringify(
    found.violations.map((each) => [each.id, each.nodes[0].html, each.nodes[0].failureSummary])))"""
IS_TOO_WIDE = "document.documentElement.scrollWidth > document.documentElement.clientWidth"


@asynccontextmanager
async def opened(scene: Scene, tab: Tab | None = None) -> AsyncIterator[Tab]:
    """Yield the page of this scene once it shows the bookies, in ``tab`` or in another browser."""
    async with served(scene) as address:
        if tab is None:
            async with chromium() as fresh, opened_at(fresh, address):
                yield fresh
        else:
            async with opened_at(tab, address):
                yield tab


@asynccontextmanager
async def opened_at(tab: Tab, address: str) -> AsyncIterator[None]:
    await tab.resize(width=1180, is_dark=False)
    await tab.open(address)
    await tab.wait_for("!!document.querySelector('#bookies h2')")
    yield


def in_page(make: Callable[[], Scene]) -> Callable[[Callable[..., Awaitable[None]]], Any]:
    """Return a decorator for a test that gets the tab and the scene."""

    def decorate(test: Callable[[Tab, Scene], Awaitable[None]]) -> Callable[[], None]:
        async def run() -> None:
            scene = make()
            async with opened(scene) as tab:
                await test(tab, scene)
                assert not [each for each in tab.errors if "503" not in each]

        def run_test() -> None:
            asyncio.run(run())

        run_test.__name__, run_test.__doc__ = test.__name__, test.__doc__
        return run_test

    return decorate


# --- Health ---------------------------------------------------------------------------------------


@in_page(scenes.whole)
async def test_it_is_green_only_while_the_state_is_new(tab: Tab, scene: Scene) -> None:
    is_green = f"{HUE} === 'state ok'"
    assert await tab.wait_for(is_green)
    assert "All ledgers are whole" in await tab.value(HEAD)

    scene.error = FROZEN
    await tab.wait_for(f"{HUE} === 'state stale'")
    assert "No answer from ZooKeeper for " in await tab.value(HEAD)
    assert FROZEN in await tab.value(HEAD)
    assert "This is the state of " in await tab.value(HEAD)
    assert "OK" not in await tab.value("document.title")
    assert "grayscale" in await tab.value("getComputedStyle(document.querySelector('main')).filter")
    await tab.wait_for("document.querySelector('#spoken').textContent.includes('ZooKeeper')")

    scene.error = None
    assert await tab.wait_for(is_green)

    scene.age_ms = 20_000  # the node answers, but reads nothing new
    await tab.wait_for(f"{HEAD}.includes('No new state for 2')")
    assert await tab.value(HUE) == "state stale"


@in_page(scenes.whole)
async def test_a_page_without_its_node_says_so(tab: Tab, scene: Scene) -> None:
    await tab.call("Network.enable")
    await tab.call(
        "Network.emulateNetworkConditions",
        offline=True,
        latency=0,
        downloadThroughput=-1,
        uploadThroughput=-1,
    )
    await tab.wait_for(f"{HEAD}.startsWith('No answer from this node for ')")
    assert await tab.value(HUE) == "state stale"
    tab.errors.clear()  # each request that failed


def test_before_the_first_answer_nothing_is_green() -> None:
    async def run() -> None:
        scene = scenes.whole()
        scene.delay_s = 60.0
        async with served(scene) as address, chromium() as tab:
            await tab.open(address)
            assert await tab.value(HEAD) == "Reading…"
            assert await tab.value(HUE) == "state quiet"
            assert not await tab.value("document.querySelector('main').checkVisibility()")

    asyncio.run(run())


def test_without_scripts_the_page_names_the_command() -> None:
    async def run() -> None:
        async with served(scenes.whole()) as address, chromium() as tab:
            await tab.call("Emulation.setScriptExecutionDisabled", value=True)
            await tab.open(address)
            text = await tab.value("document.querySelector('header').innerText")
            assert "bookmender status" in text
            assert "Reading" not in text

    asyncio.run(run())


# --- Answers --------------------------------------------------------------------------------------


def test_keys_that_an_earlier_node_does_not_send_may_be_missing() -> None:
    async def run() -> None:
        scene = scenes.one_lost()
        del scene.answers["status"]["progress"]
        for condition in scene.answers["status"]["conditions"]:
            condition.pop("muted_until_ms", None)
        for bookie in scene.answers["bookies"]["bookies"]:
            for key in ("rack", "since_ms", "ledgers_left"):
                del bookie[key]
        async with opened(scene) as tab:
            assert "1,204 ledgers to repair" in await tab.value(HEAD)
            assert await tab.value("document.querySelectorAll('.tile').length") == 40
            assert tab.errors == []

    asyncio.run(run())


def test_foreign_text_stays_text() -> None:
    evil = "<img src=x onerror=document.body.replaceChildren()>\u202e\x1b[2J"

    def poisoned(value: Any) -> Any:
        """Return the answer with the evil text at the end of each text that people choose."""
        if isinstance(value, dict):
            chosen = (
                "reason",
                "text",
                "node",
                "rack",
                "fact",
                "action",
                "host",
                "cluster",
                "leader",
            )
            return {
                key: f"{each}{evil}" if key in chosen and isinstance(each, str) else poisoned(each)
                for key, each in value.items()
            }
        return [poisoned(each) for each in value] if isinstance(value, list) else value

    async def run() -> None:
        scene = scenes.rack_lost()
        scene.answers = poisoned(scene.answers)
        async with opened(scene) as tab:
            await tab.wait_for("document.body.innerText.includes('<img src=x')")
            assert await tab.value("document.querySelectorAll('img').length") == 0
            text = await tab.value("document.body.textContent")
            assert not {"\u202e", "\x1b"} & set(text)
            assert tab.errors == []

    asyncio.run(run())


@in_page(scenes.whole)
async def test_the_sentence_fits_the_curve(tab: Tab, scene: Scene) -> None:
    def queue(*lengths: int) -> list[dict[str, int]]:
        return [{"at_ms": 60_000 * i, "ledgers": n, "bytes": 0} for i, n in enumerate(lengths)]

    rows: list[tuple[dict[str, Any], str]] = [
        (parts(next_=5, left_s=90), "About 1 min 30 s left."),
        (parts(next_=5, waiting=1, left_s=90), "without the ledgers that wait"),
        (parts(needs_help=5), "Every queued ledger needs help"),
        (parts(waiting=3, needs_help=2), "All queued ledgers wait"),
        (parts(next_=7, samples=queue(9, 8, 7)), "The queue becomes shorter"),
        (parts(next_=9, samples=queue(7, 8, 9)), "The queue has grown last"),
        (parts(next_=7, samples=queue(9, 7, 7, 7, 7)), "not become shorter for 3 min"),
        (parts(next_=7, samples=queue(7)), "is not known yet"),
    ]
    for progress, expected in rows:
        last_ms = max((each["at_ms"] for each in progress["samples"]), default=0)
        told = await tab.value(f"pace({json.dumps(progress)}, {last_ms})")
        assert expected in told, (told, progress)


@in_page(scenes.whole)
async def test_commands_in_sentences_can_be_copied(tab: Tab, scene: Scene) -> None:
    rows = {
        "Start it, or run: bookmender bookie decommission 10.0.0.1:3181": [
            "bookmender bookie decommission 10.0.0.1:3181"
        ],
        "bookmender queue shows why, bookmender plan LEDGER the details.": [
            "bookmender queue",
            "bookmender plan LEDGER",
        ],
        "Announce it with bookmender bookie maintenance ID --for 2h.": [
            "bookmender bookie maintenance ID --for 2h"
        ],
        "Run `bookmender ledger close 7 --yes`; add `--force`.": [
            "bookmender ledger close 7 --yes"
        ],
        "No bookmender node leads, and bookmender's queue is empty.": [],
    }
    for text, commands in rows.items():
        script = f"JSON.stringify([...el('p', rich({json.dumps(text)})).querySelectorAll('button')]"
        assert json.loads(await tab.value(f"{script}.map((e) => e.dataset.key))")) == commands


# --- People ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [scenes.whole, scenes.one_lost, scenes.rack_lost, scenes.many])
def test_axe_finds_nothing_and_no_page_is_too_wide(make: Callable[[], Scene]) -> None:
    axe = files("axe_core_python").joinpath("axe.min.js").read_text()

    async def run() -> None:
        scene = make()
        async with opened(scene) as tab:
            await tab.value(f"{axe}; 0")
            for width, is_dark in ((1180, False), (360, True)):
                await tab.resize(width=width, is_dark=is_dark)
                assert json.loads(await tab.value(AXE)) == [], (width, is_dark)
                assert await tab.value(IS_TOO_WIDE) is False, width
            scene.error = FROZEN
            await tab.wait_for(f"{HUE} === 'state stale'")
            assert json.loads(await tab.value(AXE)) == [], "stale"

    asyncio.run(run())


@in_page(scenes.one_lost)
async def test_the_keyboard_reaches_each_bookie_and_its_details(tab: Tab, scene: Scene) -> None:
    async def press(key: str) -> None:
        await tab.call("Input.dispatchKeyEvent", type="keyDown", key=key)

    focused = "document.activeElement.dataset.key"
    assert await tab.value("document.querySelectorAll('.tile[tabindex=\"0\"]').length") == 1
    await tab.value("document.querySelector('.tile[tabindex=\"0\"]').focus()")
    for key in ("ArrowDown", *["ArrowRight"] * 6):
        await press(key)
    assert await tab.value(focused) == "10.0.0.27:3181"
    tip = await tab.wait_for("tip.innerText.includes('10.0.0.27') && tip.innerText")
    assert "Lost for 18 min" in tip
    assert "1,204 ledgers still name it" in tip

    scene.answers["bookies"]["bookies"][16]["ledgers_left"] = 7
    await tab.wait_for("document.querySelector('#tip').innerText.includes('7 ledgers')")
    assert await tab.value(focused) == "10.0.0.27:3181"
    await press("Escape")
    assert await tab.value("document.querySelector('#tip').hidden")


@in_page(scenes.muted)
async def test_folds_stay_open_and_a_muted_condition_says_until_when(
    tab: Tab, scene: Scene
) -> None:
    fold = "document.querySelector('#conditions details')"
    assert await tab.value(f"{fold}.open") is False
    assert "1 muted condition" in await tab.value(f"{fold}.innerText")
    await tab.value(f"{fold}.open = true")
    scene.answers["status"]["conditions"].pop()  # so that the section changes
    await tab.wait_for("document.querySelectorAll('[data-code]').length === 2")
    assert await tab.value(f"{fold}.open")
    assert "muted for another 2 h" in await tab.value(f"{fold}.innerText")
    assert "--unmute BOOKIES_LOST" in await tab.value(f"{fold}.innerText")


@in_page(scenes.rack_lost)
async def test_a_copied_command_is_told(tab: Tab, scene: Scene) -> None:
    button = "document.querySelector('[data-code=SAFETY_HOLD] .command button')"
    told = "[document.querySelector('#spoken').textContent, 'done' in button.dataset]"
    script = f"(async (button) => {{ await copy(button); draw(); return {told}; }})({button})"
    assert await tab.value(script) == ["Copied: bookmender hold --end --yes", True]
