"""The page over HTTP: who may see it, and how open pages are kept up to date."""

import asyncio
import base64
import json
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiohttp import ClientResponse

from auditor.backlog import Backlog, BacklogSize
from daemon.admin_session import order_event
from daemon.http import api, live
from daemon.http.live import LivePage, QueueSamples, bearer
from daemon.http.page import SECTIONS, Sample
from daemon.role_state import NodeService, RoleState
from daemon.threads import ServiceThread
from ledgers.errors import UnavailableError
from replication.history import record_order
from tests.daemon.http.serving import TOKEN, Client, EpochClock, over_http, serving
from tests.daemon.http.test_api import trouble
from tests.replication.cluster import Cluster
from tests.replication.ledger_values import B1, B2
from tests.replication.nodes import PATHS

PATIENCE_S = 60.0
Test = Callable[[Client, Cluster], Awaitable[None]]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "REFRESH_S", 0.01)
    monkeypatch.setattr("daemon.http.cluster_reader.AGE_S", 0.0)
    monkeypatch.setattr("daemon.http.cluster_reader.AGE_FACTOR", 0.0)


def serve(test: Test, **options: Any) -> None:
    async def run() -> None:
        cluster = await Cluster.start()
        async with asyncio.timeout(PATIENCE_S), serving(cluster, **options) as client:
            await test(client, cluster)

    asyncio.run(run())


@asynccontextmanager
async def events(client: Client) -> AsyncIterator[AsyncIterator[tuple[str, Any]]]:
    """Yield the name and the data of each event."""

    async def read(response: ClientResponse) -> AsyncIterator[tuple[str, Any]]:
        name = "message"
        while line := (await response.content.readline()).decode().rstrip("\n"):
            field, _, value = line.partition(": ")
            if field == "event":
                name = value
            elif field == "data":
                yield name, json.loads(value)
                name = "message"
                await response.content.readline()

    async with client.get("/events") as response:
        assert (response.status, response.content_type) == (200, "text/event-stream")
        yield read(response)


async def until(stream: AsyncIterator[tuple[str, Any]], section: str, pattern: str) -> Any:
    """Return the first message whose section has this text."""
    async for name, message in stream:
        if name == "message" and re.search(pattern, message["sections"].get(section, "")):
            return message
    raise AssertionError("the stream ended")


async def wait_until(condition: Callable[[], bool]) -> None:
    while True:
        if condition():
            return
        await asyncio.sleep(0.01)


# --- The first view -------------------------------------------------------------------------------


@over_http()
async def test_the_first_view_is_complete_and_allows_no_other_code(
    client: Client, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "FIRST_S", 30.0)  # the machine may be slow

    await trouble(cluster)
    response = await client.get("/")
    text = await response.text()
    status = await (await client.get("/api/v1/status")).json()

    assert (response.status, response.content_type) == (200, "text/html")
    policy = response.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert not re.search(r"<script(?! src=\"page\.js\")|<style|\sstyle=|\son\w+=", text)
    assert f'data-health="{status["health"]}"' in text
    assert f'id="count-queued" data-count="{status["queue"]["total"]}"' in text
    for name, kind in (("page.css", "text/css"), ("page.js", "text/javascript")):
        assert f'"{name}"' in text
        found = await client.get(f"/{name}")
        assert (found.status, found.content_type) == (200, kind)


@over_http()
async def test_the_first_view_does_not_wait_long_for_a_slow_cluster(
    client: Client, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def read(cluster: object) -> None:
        await asyncio.sleep(PATIENCE_S)

    monkeypatch.setattr(api, "read_status", read)
    monkeypatch.setattr(live, "FIRST_S", 0.01)

    text = await (await client.get("/")).text()
    assert "The cluster is being read." in text
    assert "Not read yet." in text


# --- Access ---------------------------------------------------------------------------------------


@over_http()
async def test_a_page_of_another_host_is_refused(client: Client) -> None:
    for path in ("/", "/events"):
        response = await client.get(path, headers={"Host": "evil.example"})
        assert response.status == 403


def basic(password: str) -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(f"x:{password}".encode()).decode()}


@over_http(has_token=True, address="0.0.0.0")
async def test_a_browser_elsewhere_asks_for_the_token(client: Client) -> None:
    for path in ("/", "/events"):
        refused = await client.get(path, headers={"X-Forwarded-For": "10.0.0.9"})
        assert refused.status == 401
        assert refused.headers["WWW-Authenticate"].startswith("Basic ")
        wrong = {**basic("a-wrong-token-of-length"), "X-Forwarded-For": "10.0.0.9"}
        assert (await client.get(path, headers=wrong)).status == 401
        async with client.get(path, headers=basic(TOKEN)) as response:
            assert response.status == 200


@over_http(has_token=True)
async def test_a_password_of_the_browser_changes_nothing(client: Client) -> None:
    """A browser sends it with requests of other pages as well."""
    response = await client.post("/api/v1/disable", headers=basic(TOKEN))
    assert response.status == 401


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("Bearer x", "Bearer x"),
        ("", ""),
        ("Basic eDp5OnE=", "Bearer y:q"),
        ("basic eDp5", "Bearer y"),
        ("Basic %%", ""),
        ("Basic /w==", ""),
        ("Basic é", ""),
    ],
)
def test_a_password_is_read_as_the_token(header: str, expected: str) -> None:
    assert bearer(header) == expected


# --- Events ---------------------------------------------------------------------------------------


@over_http()
async def test_the_first_event_has_everything_and_the_next_only_what_changed(
    client: Client, cluster: Cluster
) -> None:
    async with events(client) as stream:
        first = await until(stream, "health", "OK|UNKNOWN")
        assert set(first["sections"]) == {*SECTIONS, "notice"}
        await cluster.mark(B1, ledger_id=5)
        changed = await until(stream, "queue", 'id="count-queued" data-count="1"')
        assert "history" not in changed["sections"]
        assert "1 ledger queued" in changed["title"]
        assert changed["taken_ms"] > first["taken_ms"]
        await cluster.kill(B2)
        await until(stream, "bookies", r'data-count="1"[^>]*><b>1</b> lost')


@over_http()
async def test_an_idle_stream_has_heartbeats(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "HEARTBEAT_S", 0.01)
    monkeypatch.setattr(live, "REFRESH_S", PATIENCE_S)

    async with events(client) as stream:
        while (await anext(stream))[0] != "beat":
            pass


@over_http()
async def test_without_zookeeper_the_last_state_stays_with_the_reason(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(cluster: object) -> None:
        raise UnavailableError("<ZooKeeper> does not answer")

    async with events(client) as stream:
        await until(stream, "queue", "count-queued")
        real = api.read_status
        monkeypatch.setattr(api, "read_status", fail)
        told = await until(stream, "notice", "&lt;ZooKeeper&gt; does not answer")
        assert told["problem"] == "<ZooKeeper> does not answer"
        assert "queue" not in told["sections"]
        assert "count-queued" in await (await client.get("/")).text()
        monkeypatch.setattr(api, "read_status", real)
        after = await until(stream, "notice", "^<p class=.soft.>State of")
        assert after["problem"] is None


@over_http()
async def test_a_defect_does_not_end_the_page(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def crash(cluster: object) -> None:
        raise ZeroDivisionError

    async with events(client) as stream:
        with monkeypatch.context() as patch:
            patch.setattr(live, "read_details", crash)
            await until(stream, "notice", "cannot be read")
        await until(stream, "notice", "State of")


@over_http()
async def test_all_clients_share_one_reading(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "REFRESH_S", PATIENCE_S)
    readings = []
    real = api.read_status

    async def counting(cluster: Any) -> Any:
        readings.append(cluster)
        return await real(cluster)

    monkeypatch.setattr(api, "read_status", counting)

    for _ in range(5):
        async with events(client) as stream:
            await until(stream, "queue", "count-queued")
    assert len(readings) == 1


@over_http()
async def test_nothing_is_read_while_nobody_looks(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "WATCHED_S", 0.05)
    monkeypatch.setattr(live, "HEARTBEAT_S", 0.01)
    readings = 0
    real = api.read_status

    async def counting(cluster: Any) -> Any:
        nonlocal readings
        readings += 1
        return await real(cluster)

    monkeypatch.setattr(api, "read_status", counting)

    await asyncio.sleep(0.05)
    assert readings == 0
    async with events(client) as stream:
        await until(stream, "queue", "count-queued")
    await asyncio.sleep(0.3)
    before = readings
    await asyncio.sleep(0.1)
    assert readings == before > 0


@over_http()
async def test_too_many_pages_are_refused_and_a_closed_one_makes_room(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "CLIENTS_MAX", 2)

    async with events(client), events(client):
        assert (await client.get("/events")).status == 503
        assert (await client.get("/")).status == 200
    while True:
        async with client.get("/events") as again:
            if again.status == 200:
                return
        await asyncio.sleep(0.01)


@over_http()
async def test_open_pages_do_not_delay_the_end_of_the_server(client: Client) -> None:
    async with events(client) as stream:
        await until(stream, "queue", "count-queued")
        async with asyncio.timeout(5):
            await client.server.close()


@over_http()
async def test_an_open_page_shows_what_was_recorded(
    client: Client, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "SystemClock", EpochClock)

    async with events(client) as stream:
        await until(stream, "history", "Nothing was recorded")
        event = order_event("disable", by="me@host<b>")
        await record_order(cluster.store, PATHS, node="host-a", events=[event])
        await until(stream, "history", "bookmender disable by me@host&lt;b&gt;</td>")


@over_http()
async def test_a_client_that_does_not_read_is_dropped(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queue changes its text in each message, so that there is always something to send."""
    monkeypatch.setattr(live, "WRITE_S", 0.1)
    pages: list[LivePage] = []
    real = LivePage._show

    async def show(self: LivePage, *arguments: Any) -> None:
        await real(self, *arguments)
        padding = {"history": "x" * 1_000_000 + str(self._shown.read_s)}
        self._publish(replace(self._shown, parts={**self._shown.parts, **padding}))
        pages.append(self)

    monkeypatch.setattr(LivePage, "_show", show)

    host, port = client.host, client.port
    assert port is not None
    with socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        deaf.setblocking(False)
        await asyncio.get_running_loop().sock_connect(deaf, (host, port))
        deaf.send(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await wait_until(lambda: bool(pages) and pages[0]._client_count == 1)
        await wait_until(lambda: pages[0]._client_count == 0)


# --- Samples of the queue -------------------------------------------------------------------------


def test_samples_are_thinned_and_end_with_the_newest() -> None:
    samples = QueueSamples()

    for time_ms, count in ((0, 9), (400, 8), (800, 7), (2_000, 6), (2_000, 5), (2_100, 4)):
        samples.add(count, time_ms=time_ms)

    assert [(each.time_ms, each.ledger_count) for each in samples.all()] == [
        (0, 9),
        (2_000, 6),
        (2_100, 4),
    ]


def test_samples_are_bounded() -> None:
    samples = QueueSamples()

    for number in range(live.SAMPLES_MAX + 10):
        samples.add(number, time_ms=number * 10_000)

    assert len(samples.all()) == live.SAMPLES_MAX
    assert isinstance(samples.all()[0], Sample)


def test_the_leader_s_queue_is_sampled_before_a_page_is_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live, "HEARTBEAT_S", 0.01)
    size = BacklogSize(
        by_copies_left={},
        missing_bytes=0,
        marked_count=7,
        private_count=2,
        waiting_count=0,
        oldest_mark_ms=None,
        remaining_s=None,
    )
    thread = ServiceThread("auditor", partial(asyncio.sleep, 0))
    service = NodeService(thread=thread, state=RoleState("auditor"))
    service.state.backlog = cast(Backlog, SimpleNamespace(size=size))

    async def test(client: Client, cluster: Cluster) -> None:
        await asyncio.sleep(0.1)
        text = await (await client.get("/")).text()
        assert "9 ledgers queued" in text
        assert "now 0" in text

    serve(test, roles=[service])
