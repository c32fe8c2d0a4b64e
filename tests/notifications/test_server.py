"""Clients of the library, and others, at a real server over loopback."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import aiohttp
import pytest

import notifications.client
import notifications.server
from ledgers.errors import SettingsError, UnauthorizedError
from notifications.client import Change, Notifications, NotificationThread, Refused, ledger
from notifications.protocol import KEYS_MAX
from tests.notifications.serving import Served, until


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(scenario)


async def next_change(client: Notifications) -> Change:
    async with asyncio.timeout(20):
        item = await anext(aiter(client))
    assert isinstance(item, Change), item
    return item


def test_a_client_is_told_of_each_change_of_its_ledgers() -> None:
    async def scenario() -> None:
        async with Served().running() as served, Notifications.open(served.url) as client:
            client.register(ledger(7), known=served.zxid)
            await until(lambda: served.matcher.holders)
            served.change_ledger(8)
            version = served.change_ledger(7)

            assert await next_change(client) == Change("L7", version)

    run(scenario())


def test_a_change_before_the_registration_is_told() -> None:
    async def scenario() -> None:
        async with Served().running() as served, Notifications.open(served.url) as client:
            known = served.zxid
            version = served.change_ledger(7)
            client.register(ledger(7), known=known)

            assert await next_change(client) == Change("L7", version)

    run(scenario())


def test_an_object_that_the_server_cannot_judge_is_unknown() -> None:
    async def scenario() -> None:
        async with Served().running() as served, Notifications.open(served.url) as client:
            client.register(ledger(7), known=5)

            assert await next_change(client) == Change("L7", None)

    run(scenario())


def test_after_its_server_is_lost_a_client_goes_on_at_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(notifications.client, "BACKOFF_MIN_S", 0.02)

    async def scenario() -> None:
        async with (
            Served().running() as one,
            Served().running() as other,
            Notifications.open(one.url, other.url) as client,
        ):
            client.register(ledger(7), known=one.zxid)
            await until(lambda: one.matcher.holders or other.matcher.holders)
            lost, left = (one, other) if one.matcher.holders else (other, one)
            lost.server.is_draining = True
            for channel in list(lost.server._channels.values()):
                channel.abort()
            version = left.change_ledger(7)

            assert await next_change(client) == Change("L7", version)

    run(scenario())


def test_a_restart_repeats_what_was_not_done(tmp_path: Path) -> None:
    state = str(tmp_path / "state")

    async def scenario() -> None:
        async with Served().running() as served:
            async with Notifications.open(served.url, state_file=state) as client:
                client.register(ledger(7), known=served.zxid)
                client.register(ledger(8), known=served.zxid)
                await until(lambda: len(served.matcher.holders) == 2)
                served.change_ledger(7)
                version = served.change_ledger(8)
                await next_change(client)
                assert (await next_change(client)).key == "L8"  # and is not done

            async with Notifications.open(served.url, state_file=state) as client:
                client.register(ledger(7))
                client.register(ledger(8))

                assert await next_change(client) == Change("L8", version)
                await until(lambda: len(served.matcher.holders) == 2)
                assert client._state.next_item() is None

    run(scenario())


def test_a_client_that_may_not_read_is_told_so() -> None:
    async def scenario() -> None:
        async with (
            Served(refuses=True).running() as served,
            Notifications.open(served.url) as client,
        ):
            client.register(ledger(7))
            with pytest.raises(UnauthorizedError, match="refuses this client"):
                await next_change(client)

    run(scenario())


def test_a_client_goes_on_at_another_server_if_one_refuses_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(notifications.client, "BACKOFF_MIN_S", 0.02)
    monkeypatch.setattr(notifications.client, "in_order_of", lambda _, urls: list(urls))

    async def scenario() -> None:
        async with (
            Served(refuses=True).running() as refusing,
            Served().running() as other,
            Notifications.open(refusing.url, other.url) as client,
        ):
            client.register(ledger(7), known=5)

            assert await next_change(client) == Change("L7", None)

    run(scenario())


@pytest.mark.parametrize("servers", [[], ["notify1:7319"]])
def test_a_client_needs_the_urls_of_its_servers(servers: list[str]) -> None:
    async def scenario() -> None:
        with pytest.raises(SettingsError, match="http://host:7319"):
            async with Notifications.open(*servers):
                pass

    run(scenario())


def test_a_client_that_cannot_go_on_says_so(tmp_path: Path) -> None:
    """Its token file was replaced by one that is no text."""
    token = tmp_path / "token"
    token.write_text("a token")

    async def scenario() -> None:
        async with (
            Served().running() as served,
            Notifications.open(served.url, token_file=str(token)) as client,
        ):
            token.write_bytes(b"\xff")
            client.register(ledger(7))
            with pytest.raises(UnicodeDecodeError):
                await next_change(client)

    run(scenario())


def test_too_many_objects_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("notifications.session.KEYS_MAX", 2)
    assert KEYS_MAX > 2

    async def scenario() -> None:
        async with Served().running() as served, Notifications.open(served.url) as client:
            for ledger_id in range(3):
                client.register(ledger(ledger_id), known=served.zxid)
            async with asyncio.timeout(20):
                item = await anext(aiter(client))

            assert item == Refused(keys=["L2"], code="too_many")

    run(scenario())


def test_a_program_without_asyncio_is_called_on_a_thread() -> None:
    told: list[Any] = []

    async def scenario() -> None:
        async with Served().running() as served:
            thread = await asyncio.to_thread(NotificationThread, [served.url], told.append)
            thread.register(ledger(7), served.zxid)
            await until(lambda: served.matcher.holders)
            version = served.change_ledger(7)
            await until(lambda: told)
            await asyncio.to_thread(thread.close)

            assert told == [Change("L7", version)]

    run(scenario())


def test_clients_that_lost_a_server_at_once_come_back_one_after_the_other() -> None:
    waits = [notifications.client.wait_before(3, 1.0) for _ in range(4_000)]

    assert min(waits) >= 1.0
    assert max(waits) <= 5.0
    assert all(800 < sum(s <= each < s + 1 for each in waits) < 1_200 for s in (1, 2, 3, 4))


def test_a_thread_that_cannot_open_its_files_says_so() -> None:
    with pytest.raises(FileNotFoundError):
        NotificationThread(["http://127.0.0.1:1"], print, token_file="/nowhere/token")


def test_a_program_whose_thread_ended_is_told_so() -> None:
    """Nothing is told after an exception of ``use``."""

    def use(item: object) -> None:
        raise ValueError("a mistake")

    async def scenario() -> None:
        async with Served().running() as served:
            thread = await asyncio.to_thread(NotificationThread, [served.url], use)
            thread.register(ledger(7))
            await until(lambda: thread.error)

            with pytest.raises(ValueError, match="a mistake"):
                thread.register(ledger(8))

    run(scenario())


# --- Other clients --------------------------------------------------------------------------------


async def events(response: aiohttp.ClientResponse, count: int) -> list[dict[str, str]]:
    found: list[dict[str, str]] = [{}]
    async with asyncio.timeout(20):
        while len(found) <= count:
            line = (await response.content.readline()).decode().strip()
            if line:
                name, _, value = line.partition(": ")
                found[-1][name] = value
            else:
                found.append({})
    return found[:count]


def test_server_sent_events_resume_where_they_ended() -> None:
    async def scenario() -> None:
        async with Served().running() as served, aiohttp.ClientSession() as http:
            url = f"{served.url}/v1/events?key=L7&key=L8"
            async with http.get(url) as response:
                *_, first = await events(response, 2)
            version = served.change_ledger(8)
            headers = {"Last-Event-ID": first["id"]}
            async with http.get(url, headers=headers) as response:
                *_, second = await events(response, 2)

            assert json.loads(first["data"])["changes"] == [
                ["L7", None, False],
                ["L8", None, False],
            ]
            assert json.loads(second["data"])["changes"] == [["L8", version, False]]

    run(scenario())


def test_a_published_object_is_told_to_those_who_lack_its_version() -> None:
    async def scenario() -> None:
        async with (
            Served().running() as served,
            aiohttp.ClientSession() as http,
            Notifications.open(served.url) as client,
        ):
            client.register("Oprices", known=served.zxid)
            await until(lambda: served.matcher.holders)
            async with http.post(f"{served.url}/v1/objects/prices") as response:
                said = await response.json()

            assert await next_change(client) == Change("Oprices", said["version"])
            async with http.get(f"{served.url}/v1/objects/Oprices") as response:
                assert await response.json() == ["Oprices", said["version"], False]

    run(scenario())


@pytest.mark.parametrize("said", ["nonsense", '{"type":"beat","n":0,"digest":"","count":0}'])
def test_a_client_that_does_not_speak_the_protocol_is_told_so(said: str) -> None:
    async def scenario() -> None:
        async with Served().running() as served, aiohttp.ClientSession() as http:
            async with http.ws_connect(f"{served.url}/v1/notifications") as socket:
                await socket.send_str(said)
                goodbye = json.loads((await socket.receive()).data)

            assert (goodbye["type"], goodbye["code"]) == ("goodbye", "protocol")

    run(scenario())


@pytest.mark.parametrize("key", ["L" + "9" * 5_000, "L9223372036854775808", "L07", "L", "", "X1"])
def test_a_client_with_a_wrong_key_does_not_end_the_server(key: str) -> None:
    async def scenario() -> None:
        async with Served().running() as served, aiohttp.ClientSession() as http:
            async with http.get(f"{served.url}/v1/events", params={"key": key}) as response:
                *_, said = await events(response, 2)
            async with http.get(f"{served.url}/v1/events?key=L7") as response:
                *_, other = await events(response, 2)

            assert json.loads(said["data"])["code"] == "bad_key"
            assert other["event"] == "changes"

    run(scenario())


def test_in_a_storm_clients_wait_for_their_turn_or_come_back_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(notifications.server, "HELLOS_PER_S", 2)
    monkeypatch.setattr(notifications.server, "ADMISSION_S", 0.6)

    async def scenario() -> None:
        async with Served().running() as served, aiohttp.ClientSession() as http:

            async def ask() -> tuple[int, bool]:
                async with http.get(f"{served.url}/v1/events?key=L7") as response:
                    return response.status, "Retry-After" in response.headers

            answers = await asyncio.gather(*(ask() for _ in range(10)))

            assert set(answers) == {(200, False), (503, True)}

    run(scenario())


def test_a_client_that_reads_nothing_costs_a_bounded_buffer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(notifications.server, "BUFFER_BYTES_MAX", 2_000)

    async def scenario() -> None:
        async with (
            Served().running() as served,
            aiohttp.ClientSession() as http,
            http.ws_connect(f"{served.url}/v1/notifications") as socket,
        ):
            await socket.send_str('{"type":"hello","client":"c"}')
            await socket.receive()
            add = [[f"L{number}", 0] for number in range(2_000)]
            await socket.send_str(json.dumps({"type": "register", "n": 1, "add": add}))
            await until(lambda: len(served.matcher.holders) == 2_000)
            [channel] = served.server._channels.values()
            assert channel.request.transport is not None
            socket._conn.protocol.pause_reading()  # type: ignore[union-attr]
            for number in range(20_000):
                served.change_ledger(number % 2_000)
                if number % 100 == 0:
                    await asyncio.sleep(0.001)
            await asyncio.sleep(0.1)

            assert len(channel.session.outbox) <= 2_000

    run(scenario())


def test_a_server_that_ends_sends_its_clients_away() -> None:
    async def scenario() -> None:
        async with Served().running() as served, Notifications.open(served.url) as client:
            client.register(ledger(7))
            await until(lambda: served.matcher.holders)

            async with asyncio.timeout(20):
                await served.server.drain()

            assert served.matcher.holders == {}

    run(scenario())


def test_more_clients_than_allowed_are_turned_away() -> None:
    async def scenario() -> None:
        async with Served(clients_max=1).running() as served, aiohttp.ClientSession() as http:
            url = f"{served.url}/v1/events?key=L7"
            async with http.get(url) as first:
                await events(first, 1)
                async with http.get(url) as second:
                    statuses = first.status, second.status

            assert statuses == (200, 503)

    run(scenario())
