"""Headless Chromium, driven by its DevTools protocol: a page as a person sees it."""

import asyncio
import base64
import itertools
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from aiohttp import ClientSession, ClientWebSocketResponse

from daemon.local.processes import Child, stop_all
from tests.fsck.browser import find_chromium

TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 5.0
LISTENING = re.compile(r"DevTools listening on ws://([^/]+)/")


class NavigatingError(Exception):
    """The tab was opening a page: try again."""


class Tab:
    """One tab. ``errors``: what the console and failed requests told."""

    def __init__(self, socket: ClientWebSocketResponse) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self.errors: list[str] = []

    async def call(self, method: str, **parameters: Any) -> Any:
        """Return the result of one command of the protocol."""
        call_id = next(self._ids)
        await self._socket.send_json({"id": call_id, "method": method, "params": parameters})
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                told = json.loads((await self._socket.receive()).data)
                if told.get("id") == call_id:
                    if "error" in told and "navigated" in told["error"]["message"]:
                        raise NavigatingError(told)
                    assert "error" not in told, told
                    return told["result"]
                self._note(told)

    def _note(self, event: dict[str, Any]) -> None:
        match event.get("method"):
            case "Log.entryAdded":
                self.errors.append(event["params"]["entry"]["text"])
            case "Runtime.exceptionThrown":
                self.errors.append(json.dumps(event["params"]["exceptionDetails"]))

    async def open(self, url: str) -> None:
        for domain in ("Log", "Runtime", "Page"):
            await self.call(f"{domain}.enable")
        await self.call("Page.navigate", url=url)
        await self.wait_for("document.readyState === 'complete'")

    async def value(self, script: str) -> Any:
        """Return the value of a JavaScript expression."""
        told = await self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    async def wait_for(self, script: str) -> Any:
        """Return the value of the expression once it is true."""
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                with suppress(NavigatingError):
                    if found := await self.value(script):
                        return found
                await asyncio.sleep(0.05)

    async def resize(self, *, width: int, is_dark: bool, height: int = 900) -> None:
        """Set the size of the window and the colour scheme."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        await self.call("Emulation.setDeviceMetricsOverride", **size)

    async def picture(self, *, width: int, is_dark: bool, height: int | None = None) -> bytes:
        """Return the page as PNG, of this height or the whole page."""
        await self.resize(width=width, is_dark=is_dark, height=height or 900)
        told = await self.call("Page.captureScreenshot", captureBeyondViewport=height is None)
        return base64.b64decode(told["data"])


@asynccontextmanager
async def chromium() -> AsyncIterator[Tab]:
    """Start Chromium and yield an empty tab. Raises SettingsError if Chromium is missing."""
    program = find_chromium()
    # Its helper processes may still write there for a moment after its end.
    with TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        command = [
            program,
            "--headless=new",
            "--no-sandbox",  # Chromium refuses to run as root with it, and the page is our own
            "--disable-gpu",
            "--remote-debugging-port=0",
            f"--user-data-dir={profile}",
            "about:blank",
        ]
        child = Child("chromium", command, log=Path(profile) / "chromium.log")
        try:
            address = await _address(child)
            async with ClientSession() as http:
                async with http.get(f"http://{address}/json") as answer:
                    pages = [each for each in await answer.json() if each["type"] == "page"]
                url = pages[0]["webSocketDebuggerUrl"]
                async with http.ws_connect(url, max_msg_size=0) as socket:
                    yield Tab(socket)
        finally:
            await asyncio.to_thread(stop_all, [child], timeout_s=STOP_TIMEOUT_S)


async def _address(child: Child) -> str:
    """Return host and port of the DevTools, once Chromium has logged them."""
    async with asyncio.timeout(TIMEOUT_S):
        while not (found := LISTENING.search(child.log.read_text(errors="replace"))):
            assert child.is_running, child.log_tail()
            await asyncio.sleep(0.05)
    return found[1]
