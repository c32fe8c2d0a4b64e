"""The client for Java programs keeps rule W, at a server whose every word the test chooses."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import unused_port

from daemon.local.jars import BOOKKEEPER_DEFAULT
from daemon.local.java import Java
from notifications.protocol import (
    KEYS_A_REGISTER,
    SUBPROTOCOL,
    Beat,
    Change,
    Changes,
    Digest,
    Goodbye,
    Hello,
    Refused,
    Register,
    ServerFrame,
    Welcome,
    decode_client_frame,
    encode,
)
from tests.java.jvm import java_command

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("java")]
pytest_plugins = ["tests.java.fixtures"]

TIMEOUT_S = 60.0
FEED = "cluster:1"


class Link:
    """A connection, as the server sees it."""

    def __init__(self, socket: web.WebSocketResponse, host: str) -> None:
        self._socket, self.host = socket, host

    async def say(self, *frames: ServerFrame) -> None:
        for frame in frames:
            await self._socket.send_str(encode(frame).decode())

    async def heard(self) -> Any:
        async with asyncio.timeout(TIMEOUT_S):
            return decode_client_frame((await self._socket.receive()).data)

    async def welcome(
        self, *, resync: bool = False, feed: str = FEED, urls: Sequence[str] = ()
    ) -> Hello:
        hello: Hello = await self.heard()
        sent_ms = now_ms()
        await self.say(Welcome(server="one", feed=feed, sent_ms=sent_ms, resync=resync, urls=urls))
        return hello

    async def registered(self, count: int) -> Register:
        """Return so many registrations as one frame, with the last n."""
        frames: list[Register] = []
        while sum(len(frame.add) for frame in frames) < count:
            frames.append(await self.heard())
            assert frames[-1].is_all == (len(frames) == 1)
        return Register(n=frames[-1].n, add=sorted(each for frame in frames for each in frame.add))

    async def cut(self) -> None:
        await self._socket.close()


class Scene:
    """A server, and a Java program that uses it. ``told``: what its listeners were told."""

    def __init__(self, links: asyncio.Queue[Link], program: asyncio.subprocess.Process) -> None:
        self._links, self._program = links, program

    async def link(self) -> Link:
        """Return the next connection."""
        async with asyncio.timeout(TIMEOUT_S):
            return await self._links.get()

    def order(self, *lines: str) -> None:
        assert self._program.stdin is not None
        self._program.stdin.write("".join(f"{line}\n" for line in lines).encode())

    async def told(self) -> dict[str, Any]:
        assert self._program.stdout is not None
        async with asyncio.timeout(TIMEOUT_S):
            found: dict[str, Any] = json.loads(await self._program.stdout.readline())
        return found


@asynccontextmanager
async def scene(folder: Path) -> AsyncIterator[Scene]:
    links: asyncio.Queue[Link] = asyncio.Queue()

    async def serve(request: web.Request) -> web.StreamResponse:
        socket = web.WebSocketResponse(protocols=(SUBPROTOCOL,), timeout=1.0)
        await socket.prepare(request)
        links.put_nowait(Link(socket, request.host))
        await asyncio.get_running_loop().create_future()
        return socket

    app, port = web.Application(), unused_port()
    app.router.add_get("/v1/notifications", serve)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    main = ("bookmender.NotificationsDriver", f"http://127.0.0.1:{port}")
    command = java_command(BOOKKEEPER_DEFAULT, Java.find(), temporary=folder, program=main)
    program = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    try:
        yield Scene(links, program)
    finally:
        program.kill()
        await program.wait()
        await runner.cleanup()


def run(folder: Path, play: Callable[[Scene], Coroutine[Any, Any, None]]) -> None:
    async def scenario() -> None:
        async with scene(folder) as playing:
            await play(playing)

    asyncio.run(scenario())


def changed(ledger_id: int, version: int, *, deleted: bool = False) -> dict[str, Any]:
    return {"kind": "changed", "ledger": ledger_id, "version": version, "deleted": deleted}


def now_ms() -> int:
    return int(time.monotonic() * 1000)


def told_all(position: int, n: int, *changes: Change, late_ms: int = 0) -> Changes:
    """``late_ms``: for how long the frame was on its way."""
    sent_ms = now_ms() - late_ms
    return Changes(positions={"L": position}, n=n, sent_ms=sent_ms, changes=list(changes))


def test_a_listener_is_told_of_newer_versions_only(tmp_path: Path) -> None:
    async def play(on: Scene) -> None:
        on.order("register 7 100")
        link = await on.link()
        await link.welcome()
        registered = await link.registered(1)
        await link.say(
            told_all(150, registered.n, Change("L7", 100)),
            told_all(160, registered.n, Change("L7", 155)),
            told_all(170, registered.n, Change("L7", 155), Change("L7", 170, True)),
            told_all(180, registered.n, Change("L7", None)),
        )

        assert registered.add == [("L7", 100)]
        assert [await on.told() for _ in range(3)] == [
            changed(7, 155),
            changed(7, 170, deleted=True),
            changed(7, -1),
        ]

    run(tmp_path, play)


def test_only_a_complete_answer_moves_the_position(tmp_path: Path) -> None:
    async def play(on: Scene) -> None:
        on.order("register 7 100", "register 8 100")
        link = await on.link()
        await link.welcome()
        await link.registered(2)
        await link.say(Changes(positions={"L": 150}, n=None, changes=[Change("L7", 120)]))
        await on.told()
        await link.cut()
        again = await on.link()

        assert (await again.welcome()).resume == f"{FEED}:L=0"
        assert (await again.registered(2)).add == [("L7", 120), ("L8", 100)]

    run(tmp_path, play)


def test_a_position_counts_for_the_registrations_that_were_answered(tmp_path: Path) -> None:
    async def play(on: Scene) -> None:
        on.order("register 7 0")
        link = await on.link()
        await link.welcome()
        n = (await link.registered(1)).n
        await link.say(told_all(150, n, Change("L7", 20)))
        await on.told()
        on.order("register 8 30")
        second = await link.heard()
        await link.say(told_all(170, n), Goodbye(code="moved"))
        again = await on.link()

        assert second == Register(n=n + 1, add=[("L8", 30)])
        assert (await again.welcome()).resume == f"{FEED}:L=170"
        assert (await again.registered(2)).add == [("L7", 170), ("L8", 30)]

    run(tmp_path, play)


def test_no_answer_to_a_part_of_the_registrations_moves_the_position(tmp_path: Path) -> None:
    async def play(on: Scene) -> None:
        on.order("register 7 100")
        link = await on.link()
        await link.welcome()
        n = (await link.registered(1)).n
        await link.say(told_all(150, n), Goodbye(code="moved"))
        link = await on.link()
        await link.welcome()
        await link.say(told_all(200, 0), Goodbye(code="moved"))  # it has not read the registrations
        link = await on.link()

        assert (await link.welcome()).resume == f"{FEED}:L=150"
        assert (await link.registered(1)).add == [("L7", 150)]

    run(tmp_path, play)


def test_after_a_resync_everything_is_told_again(tmp_path: Path) -> None:
    async def play(on: Scene) -> None:
        on.order("register 7 0")
        link = await on.link()
        await link.welcome()
        n = (await link.registered(1)).n
        await link.say(told_all(150, n, Change("L7", 140)), Goodbye(code="moved"))
        before = await on.told()
        link = await on.link()
        await link.welcome(resync=True, feed="cluster:2")
        registered = await link.registered(1)
        await link.say(told_all(90, 1, Change("L7", 80)), Goodbye(code="moved"))
        after = await on.told()
        link = await on.link()

        assert registered.add == [("L7", 0)]
        assert [before, after] == [changed(7, 140), changed(7, 80)]
        assert (await link.welcome(feed="cluster:2")).resume == "cluster:2:L=90"
        assert (await link.registered(1)).add == [("L7", 90)]

    run(tmp_path, play)


def test_nothing_counts_after_a_frame_that_makes_no_sense(tmp_path: Path) -> None:
    async def play(on: Scene) -> None:
        on.order("register 7 0")
        link = await on.link()
        await link.welcome()
        n = (await link.registered(1)).n
        await link.say(told_all(150, n, Change("what", 140)), told_all(170, n))
        again = await on.link()

        assert (await again.welcome()).resume == f"{FEED}:L=0"
        assert (await again.registered(1)).add == [("L7", 0)]

    run(tmp_path, play)


def test_a_refusal_is_told_and_not_repeated(tmp_path: Path) -> None:
    async def play(on: Scene) -> None:
        on.order("register 7 0", "register 8 0")
        link = await on.link()
        await link.welcome()
        n = (await link.registered(2)).n
        await link.say(Refused(keys=["L8"], code="too_many"), told_all(150, n))
        refused = await on.told()
        await link.say(Goodbye(code="moved"))
        again = await on.link()
        await again.welcome()

        assert refused == {"kind": "refused", "ledger": 8, "code": "too_many"}
        assert (await again.heard()).add == [("L7", 150)]

    run(tmp_path, play)


def test_after_different_digests_a_position_counts_for_no_ledger(tmp_path: Path) -> None:
    async def play(on: Scene) -> None:
        on.order("register 7 100")
        link = await on.link()
        await link.welcome()
        await link.say(told_all(150, (await link.registered(1)).n))
        await link.say(Goodbye(code="digest"))
        again = await on.link()
        await again.welcome()

        assert (await again.registered(1)).add == [("L7", 100)]

    run(tmp_path, play)


def test_a_client_measures_the_clock_again_after_a_late_answer(tmp_path: Path) -> None:
    async def play(on: Scene) -> None:
        on.order("register 7 0")
        link = await on.link()
        await link.welcome()
        n = (await link.registered(1)).n
        await link.say(told_all(150, n))
        await link.say(told_all(150, n, late_ms=8_000))

        assert isinstance(await link.heard(), Beat)
        assert await link.heard() == Register(n=n + 1)

    run(tmp_path, play)


def test_a_client_finds_the_other_servers(tmp_path: Path) -> None:
    async def play(on: Scene) -> None:
        on.order("register 7 0")
        link = await on.link()
        other = link.host.replace("127.0.0.1", "localhost")
        await link.welcome(urls=[f"http://{other}"])
        await link.say(Goodbye(code="moved"))
        again = await on.link()
        await again.say(Goodbye(code="moved"))

        assert again.host == other
        assert (await on.link()).host == link.host

    run(tmp_path, play)


def test_many_ledgers_are_registered_in_pages_and_have_the_same_digest(tmp_path: Path) -> None:
    ledger_ids = range(KEYS_A_REGISTER + 1)

    async def play(on: Scene) -> None:
        on.order(*(f"register {ledger_id} 0" for ledger_id in ledger_ids))
        link = await on.link()
        await link.welcome()
        await link.registered(len(ledger_ids))
        await link.say(Goodbye(code="moved"))
        link = await on.link()
        await link.welcome()
        first, second = await link.heard(), await link.heard()
        on.order("digest")

        assert (first.n, len(first.add), first.is_all) == (1, KEYS_A_REGISTER, True)
        assert (second.n, len(second.add), second.is_all) == (2, 1, False)
        digest = str(Digest(f"L{ledger_id}" for ledger_id in ledger_ids))
        assert await on.told() == {"kind": "digest", "digest": digest}

    run(tmp_path, play)


@pytest.mark.long(group="feed")  # it takes half a minute until a program calls itself stale
def test_a_client_beats_and_knows_that_it_is_told_nothing(tmp_path: Path) -> None:
    async def play(on: Scene) -> None:
        on.order("register 7 0")
        link = await on.link()
        await link.welcome()
        n = (await link.registered(1)).n
        await link.say(told_all(150, n))
        first, second = await link.heard(), await link.heard()

        async def is_stale() -> bool:
            on.order("stale")
            return bool((await on.told())["stale"])

        while not await is_stale():  # noqa: ASYNC110  # no event tells it
            await asyncio.sleep(0.1)
        await link.say(told_all(150, n, Change("L7", 150), late_ms=31_000))
        assert await on.told() == changed(7, 150)
        assert await is_stale()
        await link.say(told_all(151, n))

        assert first == second == Beat(n=n, digest=str(Digest(["L7"])), count=1)
        while await is_stale():  # noqa: ASYNC110
            await asyncio.sleep(0.1)

    run(tmp_path, play)


def test_what_is_not_wanted_any_more_is_not_told(tmp_path: Path) -> None:
    async def play(on: Scene) -> None:
        on.order("register 7 0", "register 8 0")
        link = await on.link()
        await link.welcome()
        n = (await link.registered(2)).n
        on.order("unregister 7")
        removed = await link.heard()
        await link.say(told_all(150, n + 1, Change("L7", 140), Change("L8", 150)))

        assert removed == Register(n=n + 1, remove=["L7"])
        assert await on.told() == changed(8, 150)

    run(tmp_path, play)
