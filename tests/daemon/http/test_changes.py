"""Changes over HTTP: what the commands of the same names do, with the token only."""

import socket
from typing import Any

import pytest

from daemon.http import changes
from daemon.http.endpoints import ENDPOINTS
from ledgers.errors import ConflictError
from replication.history import read_history
from replication.orders import Orders, OrderStore
from tests.daemon.http.serving import BEARER, Client, checked, over_http
from tests.replication.cluster import Cluster
from tests.replication.ledger_values import B1, B2
from tests.replication.nodes import PATHS

DRAIN, WINDOW = "/api/v1/bookies/{bookie}/drain", "/api/v1/bookies/{bookie}/maintenance"


async def orders_of(cluster: Cluster) -> Orders:
    return await OrderStore(cluster.store, PATHS).read()


@over_http(has_token=True)
async def test_every_change_is_refused_without_the_token(client: Client, cluster: Cluster) -> None:
    for endpoint in ENDPOINTS:
        if endpoint.changes:
            path = endpoint.path.format(bookie=B1)
            for headers in ({}, {"Authorization": "Bearer wrong"}):
                answer = await client.request(endpoint.method, path, headers=headers)
                assert answer.status == 401, endpoint
                await checked(answer, endpoint.path)
    assert await orders_of(cluster) == Orders()
    assert await cluster.store.exists(PATHS.disable) is None


@over_http(has_token=True, mode="observe")
async def test_a_node_that_observes_changes_nothing(client: Client, cluster: Cluster) -> None:
    answer = await client.post("/api/v1/disable", headers=BEARER)
    assert answer.status == 403
    assert await cluster.store.exists(PATHS.disable) is None


@over_http(has_token=True)
async def test_the_history_says_that_a_change_came_over_http(
    client: Client, cluster: Cluster
) -> None:
    await client.post("/api/v1/disable", headers=BEARER)
    await client.put("/api/v1/autorecovery/status?enabled=true", headers=BEARER)
    recorded = await read_history(cluster.store, PATHS)
    told = [(noted.event.order, noted.event.by) for noted in recorded.events]
    by = f"http@{socket.gethostname()}"
    assert told == [("disable", by), ("enable", by)]


@over_http(has_token=True)
async def test_auto_recovery_is_disabled_and_enabled(client: Client, cluster: Cluster) -> None:
    async def switch(name: str) -> tuple[bool, bool]:
        path = f"/api/v1/{name}"
        record = await checked(await client.post(path, headers=BEARER), path)
        is_disabled = await cluster.store.exists(PATHS.disable) is not None
        assert record["is_enabled"] is not is_disabled
        return record["is_enabled"], record["has_changed"]

    assert await switch("disable") == (False, True)
    assert await switch("disable") == (False, False)
    assert await switch("enable") == (True, True)
    assert await switch("enable") == (True, False)


@over_http(has_token=True)
async def test_a_change_is_seen_by_the_next_reading(client: Client) -> None:
    async def is_disabled() -> bool:
        return bool((await (await client.get("/api/v1/status")).json())["is_disabled"])

    assert not await is_disabled()
    await client.post("/api/v1/disable", headers=BEARER)
    assert await is_disabled()


@over_http(has_token=True)
async def test_a_hold_begins_and_ends(client: Client) -> None:
    path = "/api/v1/hold"
    order = {"for_s": 60, "reason": "new switch"}
    began = await checked(await client.post(path, json=order, headers=BEARER), path)
    assert (began["is_held"], began["hold"]["reason"]) == (True, "new switch")
    assert began["hold"]["until_ms"] - began["hold"]["since_ms"] == 60_000
    ended = await checked(await client.delete(path, headers=BEARER), path)
    assert (ended["is_held"], ended["hold"]) == (False, None)
    endless = await checked(await client.post(path, headers=BEARER), path)
    assert endless["hold"]["until_ms"] is None


@over_http(has_token=True)
async def test_a_hold_with_absent_bookies_ends_only_if_their_loss_is_accepted(
    client: Client, cluster: Cluster
) -> None:
    await cluster.kill(B1)
    await client.post("/api/v1/hold", headers=BEARER)
    refused = await client.delete("/api/v1/hold", headers=BEARER)
    assert refused.status == 409
    told = await checked(refused, "/api/v1/hold")
    assert B1 in told["error"]
    assert "accept_lost=true" in told["error"]
    query = {"accept_lost": "true"}
    ended = await client.delete("/api/v1/hold", params=query, headers=BEARER)
    assert (await checked(ended, "/api/v1/hold"))["is_held"] is False


@over_http(has_token=True)
async def test_a_bookie_is_drained_and_the_drain_withdrawn(
    client: Client, cluster: Cluster
) -> None:
    path = DRAIN.format(bookie=B1)
    for fence_open, has_changed in ((None, True), (None, False), (True, True)):
        body = {} if fence_open is None else {"fence_open": fence_open}
        record = await checked(await client.put(path, json=body, headers=BEARER), DRAIN)
        assert record["has_changed"] is has_changed
        assert any("still accepts writes" in text for text in record["concerns"])
    assert (await orders_of(cluster)).draining[B1].may_fence
    for has_changed in (True, False):
        record = await checked(await client.delete(path, headers=BEARER), DRAIN)
        assert record["has_changed"] is has_changed
    assert not (await orders_of(cluster)).draining


@over_http(has_token=True)
async def test_the_drain_of_an_absent_bookie_must_be_wanted(
    client: Client, cluster: Cluster
) -> None:
    await cluster.kill(B1)
    path = DRAIN.format(bookie=B1)
    refused = await client.put(path, headers=BEARER)
    assert refused.status == 409
    assert "accept_absent" in (await checked(refused, DRAIN))["error"]
    done = await client.put(path, json={"accept_absent": True}, headers=BEARER)
    assert (await checked(done, DRAIN))["has_changed"] is True


@over_http(has_token=True)
async def test_a_maintenance_window_begins_and_ends(client: Client, cluster: Cluster) -> None:
    path = WINDOW.format(bookie=B1)
    order = {"for_s": 600, "reason": "new disk"}
    record = await checked(await client.put(path, json=order, headers=BEARER), WINDOW)
    assert record["has_changed"] is True
    window = (await orders_of(cluster)).maintenance[B1]
    assert (window.until_ms - window.since_ms, window.reason) == (600_000, "new disk")
    for has_changed in (True, False):
        record = await checked(await client.delete(path, headers=BEARER), WINDOW)
        assert record["has_changed"] is has_changed


@over_http(has_token=True)
async def test_a_window_that_makes_ledgers_unreadable_must_be_wanted(
    client: Client, cluster: Cluster
) -> None:
    await cluster.write_ledger((B1, B2))
    await cluster.kill(B1)
    path = WINDOW.format(bookie=B2)
    refused = await client.put(path, json={"for_s": 60}, headers=BEARER)
    assert refused.status == 409
    assert "accept_unavailable" in (await checked(refused, WINDOW))["error"]
    assert not (await orders_of(cluster)).maintenance
    order = {"for_s": 60, "accept_unavailable": True}
    assert (await client.put(path, json=order, headers=BEARER)).status == 200


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        pytest.param("POST", "/api/v1/hold", b"{", 400, id="no JSON"),
        pytest.param("POST", "/api/v1/hold", b"[" * 60_000, 400, id="deep nesting"),
        pytest.param("POST", "/api/v1/hold", b'{"four_s": 1}', 400, id="an unknown key"),
        pytest.param("POST", "/api/v1/hold", b'{"for_s": 0}', 400, id="no time"),
        pytest.param("POST", "/api/v1/hold", b'{"for_s": 1e9}', 400, id="too long"),
        pytest.param("POST", "/api/v1/hold", b'{"reason": "a\\nb"}', 400, id="two lines"),
        pytest.param("DELETE", "/api/v1/hold?accept_lost=maybe", b"", 400, id="no boolean"),
        pytest.param("PUT", "/api/v1/bookies/{bookie}/maintenance", b"", 400, id="no length"),
        pytest.param("PUT", "/api/v1/bookies/a b/drain", b"", 400, id="no bookie id"),
        pytest.param("PUT", "/api/v1/bookies/nix:1/drain", b"", 404, id="an unknown bookie"),
        pytest.param(
            "PUT", "/api/v1/autorecovery/lost_bookie_recovery_delay", b"{}", 400, id="no delay"
        ),
    ],
)
@over_http(has_token=True)
async def test_wrong_requests_change_nothing(
    client: Client, cluster: Cluster, method: str, path: str, body: bytes, status: int
) -> None:
    url = path.format(bookie=B1)
    answer = await client.request(method, url, data=body, headers=BEARER)
    assert answer.status == status, await answer.text()
    assert (await answer.json())["error"]
    assert await orders_of(cluster) == Orders()


@over_http(has_token=True)
async def test_a_conflict_is_told(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    async def lost(*arguments: Any, **options: Any) -> Any:
        raise ConflictError("the znode is at another version")

    monkeypatch.setattr(changes, "switch_off", lost)

    answer = await client.post("/api/v1/disable", headers=BEARER)
    assert answer.status == 409
    assert "Try again" in (await checked(answer, "/api/v1/disable"))["error"]
