"""The parts of ``bench.notify`` with ZooKeeper, bookies, a node of ours and ``bookmender notify
serve``."""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import aiohttp
import msgspec

from bench.arena import Arena, open_arena
from bench.contenders import OURS
from bench.feed import LEDGER_IDS, FeedGround, open_ground
from bench.feed_load import changing_metadata
from bench.loads import LOADS
from bench.loss import Loss, Measure, idle_packets_per_s
from bench.notify_load import ChangeLog, client_process, wait_ready
from bench.records import Record
from bench.session import Session
from bench.turns import warm_bookies, warm_daemon
from bench.waiting import wait_until
from checkpoints.chain import order_change
from daemon.local.ports import free_ports
from ledgers.clock import SystemClock
from ledgers.codec.metadata import serialize_metadata
from ledgers.errors import UnavailableError
from ledgers.store import ANY_VERSION
from notifications.client import Change, Notifications, ledger
from notifications.protocol import Version
from tests.cluster.steps import nodes

CHANGES, PUBLISH, REPAIR = "changes", "publish", "repair"
DURATION_S, QUICK_DURATION_S, WARM_UP_S, SETTLE_S, TOLD_S = 10.0, 3.0, 5.0, 3.0, 60.0
LIBRARY_CLIENTS, CHANGES_PER_S = 20, 1_000
RARE_COUNT, QUIET_S = 8, 10.0
PUBLISHERS, NAMES_EACH = 200, 5
SERVER_NICE, CLIENTS_NICE = 15, 19
"""A server as its unit starts it, and clients that would be on other hosts."""
STORM_CLIENTS, STORM_AGAIN_S = 2_000, 6.0
REPAIRS = 3
SECRET = "a token for this bench"


@asynccontextmanager
async def serving(arena: Arena) -> AsyncIterator[str]:
    """Run ``bookmender notify serve`` with a lower priority, and yield its URL."""
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    with TemporaryDirectory(prefix="bench-notify-") as name:
        (token := Path(name) / "token").write_text(SECRET)
        settings = {
            "NOTIFY_PORT": str(port),
            "NOTIFY_URL": url,
            "HTTP_ENABLED": "true",
            "HTTP_TOKEN_FILE": str(token),
            "LOG_LEVEL": "info",
        }
        async with nodes(arena.cluster.metadata_service_uri, Path(name)) as start:
            child = start("notify", command=("daemon", "notify", "serve"), settings=settings)
            os.setpriority(os.PRIO_PROCESS, child.pid, SERVER_NICE)
            await wait_ready(url)
            yield url


@asynccontextmanager
async def open_served() -> AsyncIterator[tuple[FeedGround, str]]:
    """Start a cluster with a feed, a node and a server of notifications, and yield its URL, too."""
    async with open_ground() as ground:
        await ground.enable_feed()
        async with serving(ground.arena) as url:
            yield ground, url


async def measure_changes(session: Session, is_quick: bool) -> Record:
    """Change ledgers in ZooKeeper, steadily and then rarely, for clients of the library."""
    arrived_s: dict[Version | None, float] = {}

    async def follow(url: str, ledger_ids: Sequence[int]) -> None:
        async with Notifications.open(url) as notifications:
            for each in ledger_ids:
                notifications.register(ledger(each))
            async for item in notifications:
                if isinstance(item, Change):
                    arrived_s[item.version] = time.monotonic()

    async def wait_told(versions: Sequence[Version]) -> None:
        await wait_until(
            lambda: all(version in arrived_s for version in versions),
            "notifications",
            timeout_s=TOLD_S,
            poll_s=0.1,
        )

    async with open_served() as (ground, url), asyncio.TaskGroup() as tasks:
        following = [
            tasks.create_task(follow(url, LEDGER_IDS[first::LIBRARY_CLIENTS]))
            for first in range(LIBRARY_CLIENTS)
        ]
        load = ground.load(CHANGES_PER_S)
        await wait_told((await load.run(WARM_UP_S)).zxids[-1:])
        result = await load.run(QUICK_DURATION_S if is_quick else DURATION_S)
        await wait_told(result.zxids)  # no ledger twice, so none is superseded
        waits_ms = sorted(
            1e3 * (arrived_s[zxid] - sent_s)
            for zxid, sent_s in zip(result.zxids, result.sent_s, strict=True)
        )
        rare_ms = []
        for number in range(2 if is_quick else RARE_COUNT):
            await asyncio.sleep(QUIET_S + random.random())
            data = serialize_metadata(changing_metadata(number, ground.arena.cluster.bookies)[0])
            path, sent_s = ground.arena.seen.manager.path(LEDGER_IDS[number]), time.monotonic()
            stat = await ground.store.set(path, data, version=ANY_VERSION)
            await wait_told([stat.mzxid])
            rare_ms.append(1e3 * (arrived_s[stat.mzxid] - sent_s))
        for task in following:
            task.cancel()
    median_ms, p99_ms = statistics.median(waits_ms), waits_ms[len(waits_ms) * 99 // 100]
    rare_median_ms = statistics.median(rare_ms)
    return Record(
        name=CHANGES,
        values={
            "median_ms": median_ms,
            "p99_ms": p99_ms,
            "rare_median_ms": rare_median_ms,
            "rare_most_ms": max(rare_ms),
        },
        text=f"change in ZooKeeper to client: median {median_ms:.0f} ms, p99 {p99_ms:.0f} ms at "
        f"{result.per_s:,.0f} changes/s; {len(rare_ms)} changes after {QUIET_S:.0f} s of quiet: "
        f"median {rare_median_ms:.0f} ms, most {max(rare_ms):.0f} ms",
    )


async def measure_publish(session: Session, is_quick: bool) -> Record:
    """Publish through one server. Each publisher waits for the answer before the next one."""
    latest: dict[str, Version] = {}
    waits_s: list[float] = []

    async def publish_always(port: int, names: Sequence[str]) -> None:
        # A client in Python needs more CPU for a request than the server that is measured.
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while True:
            for name in names:
                sent_s = time.monotonic()
                head = f"POST /v1/objects/{name} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
                writer.write(f"{head}Authorization: Bearer {SECRET}\r\n\r\n".encode())
                answer = await reader.readuntil(b"}\n")
                if not answer.startswith(b"HTTP/1.1 200 "):
                    raise UnavailableError(f"refused: {answer.decode()}")
                latest[name] = msgspec.json.decode(answer.partition(b"\r\n\r\n")[2])["version"]
                waits_s.append(time.monotonic() - sent_s)

    async with open_served() as (_, url), asyncio.TaskGroup() as tasks:
        port = int(url.rpartition(":")[2])
        publishing = [
            tasks.create_task(publish_always(port, [f"o{n}-{i}" for i in range(NAMES_EACH)]))
            for n in range(PUBLISHERS)
        ]
        await asyncio.sleep(WARM_UP_S)
        waits_s.clear()
        began_s = time.monotonic()
        await asyncio.sleep(QUICK_DURATION_S if is_quick else DURATION_S)
        per_s, told_s = len(waits_s) / (time.monotonic() - began_s), sorted(waits_s)
        for task in publishing:
            task.cancel()
        await asyncio.sleep(SETTLE_S)
        async with aiohttp.ClientSession() as http:
            for name, version in latest.items():
                async with http.get(f"{url}/v1/objects/O{name}") as response:
                    if (await response.json())[1] < version:
                        raise UnavailableError(f"the publication of {name} was lost")
    return Record(
        name=PUBLISH,
        values={"publications_per_s": per_s},
        text=f"{PUBLISHERS} publishers: {per_s:,.0f} publications/s; publication to answer: median "
        f"{1e3 * statistics.median(told_s):.0f} ms, p99 "
        f"{1e3 * told_s[len(told_s) * 99 // 100]:.0f} ms",
    )


async def measure_repair(session: Session, is_quick: bool) -> Record:
    """Repair the same loss beside an idle server and beside a storm of its clients, in turn."""
    load = LOADS["a"].quick() if is_quick else LOADS["a"]
    found: dict[bool, list[Measure]] = {False: [], True: []}
    async with open_arena(bookies=5, session_timeout_s=2.0) as arena:
        await warm_bookies(arena)
        async with warm_daemon(arena, OURS) as child:
            now_ms = SystemClock().wall_ms()
            await order_change(
                arena.seen.store,
                arena.seen.paths,
                lambda chain: chain.enabled(now_ms=now_ms, by="bench", retention_s=3_600),
            )
            async with serving(arena) as url:
                idle = await idle_packets_per_s(arena)
                for number in range(2 if is_quick else 2 * REPAIRS):
                    is_storm = number % 2 == 1
                    ledgers = await arena.write(load)
                    storm = asyncio.create_task(_storm(url)) if is_storm else None
                    loss = Loss(arena, child, ledgers)
                    values = await loss.measure(idle_packets_per_s=idle)
                    if storm is not None:
                        storm.cancel()
                        with suppress(asyncio.CancelledError):
                            await storm
                    await arena.judge_and_restore(ledgers, is_judged=False)
                    session.say(f"storm {is_storm}: {values}")
                    found[is_storm].append(values)
    ratios = {
        name: statistics.median(each[name] for each in found[True])
        / statistics.median(each[name] for each in found[False])
        for name in ("whole_s", "packets", "copied_bytes", "bookies_cpu_s")
    }
    return Record(
        name=REPAIR,
        values=ratios,
        text=f"beside a storm of {STORM_CLIENTS:,} clients against none: "
        + ", ".join(f"{name} {ratio:.2f} x" for name, ratio in ratios.items()),
    )


async def _storm(url: str) -> None:
    """Kill all clients every few seconds, and start them again."""
    while True:
        with client_process(ChangeLog(10_000), [url], clients=STORM_CLIENTS) as clients:
            assert clients.process.pid is not None
            os.setpriority(os.PRIO_PROCESS, clients.process.pid, CLIENTS_NICE)
            await asyncio.sleep(STORM_AGAIN_S)
