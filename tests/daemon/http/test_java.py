"""BookKeeper's own paths, with Java's bodies. tests/cluster/test_http.py compares with Java."""

import asyncio
from typing import Any

import pytest

from daemon.http import cluster_reader
from daemon.http.java import to_json
from replication import znodes
from tests.daemon.http.serving import BEARER, Client, over_http
from tests.replication.cluster import Cluster
from tests.replication.ledger_values import B1, B2, B3
from tests.replication.nodes import PATHS, ROOT

BASE = "/api/v1/autorecovery"
MARKED = f"{BASE}/list_under_replicated_ledger"
DELAY = f"{BASE}/lost_bookie_recovery_delay"


async def answer(client: Client, path: str, method: str = "GET", **options: Any) -> tuple[int, str]:
    response = await client.request(method, path, **options)
    return response.status, await response.text()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"enabled": True}, '{\n  "enabled" : true\n}'),
        ({"b1:1": None, "b2:1": "b2"}, '{\n  "b1:1" : null,\n  "b2:1" : "b2"\n}'),
        ({}, "{ }"),
        ([1, 22], "[ 1, 22 ]"),
        ([], "[ ]"),
        ({7: ["b1:1", "b2:1"], 8: []}, '{\n  "7" : [ "b1:1", "b2:1" ],\n  "8" : [ ]\n}'),
    ],
)
def test_json_is_laid_out_as_java_s(value: Any, text: str) -> None:
    assert to_json(value) == text


@over_http(bookies=(B1, B2, B3), has_token=True)
async def test_auto_recovery_is_shown_and_switched(client: Client) -> None:
    path, on, off = f"{BASE}/status", '{\n  "enabled" : true\n}', '{\n  "enabled" : false\n}'
    assert await answer(client, path) == (200, on)
    for given, body in (("false", off), ("TRUE", on), ("False", off)):
        done = await answer(client, f"{path}?enabled={given}", "PUT", headers=BEARER)
        assert done == (200, body)
        assert await answer(client, path) == (200, body)
    status, _ = await answer(client, path, "PUT", headers=BEARER)
    assert status == 400


@pytest.mark.parametrize("typo", ["", "ture", "0", "no"])
@over_http(bookies=(B1, B2, B3), has_token=True)
async def test_a_misspelled_value_does_not_disable_auto_recovery(client: Client, typo: str) -> None:
    path = f"{BASE}/status"
    status, told = await answer(client, f"{path}?enabled={typo}", "PUT", headers=BEARER)
    assert (status, "must be true or false" in told) == (400, True)
    assert await answer(client, path) == (200, '{\n  "enabled" : true\n}')


@over_http(bookies=(B1, B2, B3), has_token=True)
async def test_marked_ledgers_are_listed_by_missing_bookie(
    client: Client, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_reader, "AGE_S", 0.0)
    monkeypatch.setattr(cluster_reader, "AGE_FACTOR", 0.0)

    assert await answer(client, MARKED) == (404, "No under replicated ledgers found")
    await cluster.mark(B1, ledger_id=5)
    await cluster.mark(B1, B2, ledger_id=9)
    assert await answer(client, MARKED) == (200, "[ 5, 9 ]")
    for query, found in (
        (f"missingreplica={B1}", "[ 5, 9 ]"),
        (f"missingreplica={B2}", "[ 9 ]"),
        (f"excludingmissingreplica={B2}", "[ 5 ]"),
        (f"missingreplica={B1}&excludingmissingreplica={B2}", "[ 5 ]"),
        (
            "printmissingreplica",
            f'{{\n  "5" : [ "{B1}" ],\n  "9" : [ "{B1}", "{B2}" ]\n}}',
        ),
    ):
        assert await answer(client, f"{MARKED}?{query}") == (200, found)
    none = await answer(client, f"{MARKED}?missingreplica={B3}")
    assert none == (404, "No under replicated ledgers found")


@over_http(bookies=(B1, B2, B3), has_token=True)
async def test_the_auditor_is_named_and_triggered(client: Client, cluster: Cluster) -> None:
    who, trigger = f"{BASE}/who_is_auditor", f"{BASE}/trigger_audit"
    assert await answer(client, who) == (404, "No auditor elected")
    status, told = await answer(client, trigger, "PUT", headers=BEARER)
    assert (status, told.startswith("Exception when do operation.No auditor")) == (404, True)
    vote = znodes.vote_to_bytes("b2:3181")
    await cluster.store.create(f"{PATHS.election}/V_0000000003", vote, with_parents=True)
    delay = znodes.recovery_delay_to_bytes(30)
    await cluster.store.create(PATHS.recovery_delay, delay)
    before = await cluster.store.exists(PATHS.recovery_delay)
    done = await answer(client, trigger, "PUT", headers=BEARER)
    assert done == (200, "Success trigger audit.")
    after = await cluster.store.exists(PATHS.recovery_delay)
    assert before is not None
    assert after is not None
    assert after.version == before.version + 1
    assert await answer(client, who) == (200, "Auditor: b2:3181")


@over_http(bookies=(B1, B2, B3), has_token=True)
async def test_the_recovery_delay_is_shown_and_set(client: Client) -> None:
    status, _ = await answer(client, DELAY)
    assert status == 404
    for delay_s in (30, 0):
        done = await answer(client, DELAY, "PUT", json={"delay_seconds": delay_s}, headers=BEARER)
        assert done == (200, f"Success set lostBookieRecoveryDelay to {delay_s}")
        shown = await answer(client, DELAY)
        assert shown == (200, f"lostBookieRecoveryDelay value: {delay_s}")


@over_http(bookies=(B1, B2, B3), has_token=True)
async def test_a_stopped_bookie_is_decommissioned(client: Client, cluster: Cluster) -> None:
    path, cookie = f"{BASE}/decommission", f"{ROOT}/cookies/{B3}"

    async def ask(bookie: str, **more: Any) -> tuple[int, str]:
        body = {"bookie_src": bookie, **more}
        return await answer(client, path, "PUT", json=body, headers=BEARER)

    await cluster.store.create(PATHS.recovery_delay, znodes.recovery_delay_to_bytes(0))
    status, told = await ask(B3, delete_cookie="true")
    assert (status, "still registered" in told) == (404, True)
    assert (await ask("no bookie"))[0] == 400
    await cluster.kill(B3)
    sent = (200, f"Success send decommission Bookie command {B3}")
    assert await ask(B3) == sent
    await asyncio.sleep(0.2)
    stat = await cluster.store.exists(PATHS.recovery_delay)
    assert stat is not None
    assert stat.version == 1, "an audit was asked for"
    assert await cluster.store.exists(cookie) is not None
    assert await ask(B3, delete_cookie=True) == sent
    async with asyncio.timeout(10):
        while await cluster.store.exists(cookie) is not None:  # noqa: ASYNC110  # no event
            await asyncio.sleep(0.05)


@over_http(bookies=(B1, B2, B3), has_token=True)
async def test_one_bookie_is_decommissioned_at_a_time(
    client: Client, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def wait_for_ever(*arguments: Any, **options: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr("daemon.http.java.decommission", wait_for_ever)

    await cluster.kill(B2, B3)
    statuses = []
    for bookie in (B3, B2):
        body = {"bookie_src": bookie, "delete_cookie": "true"}
        status, _ = await answer(client, f"{BASE}/decommission", "PUT", json=body, headers=BEARER)
        statuses.append(status)
    assert statuses == [200, 404]


@over_http(bookies=(B1, B2, B3), has_token=True)
async def test_stopped_bookies_are_recovered(client: Client, cluster: Cluster) -> None:
    async def ask(**body: Any) -> tuple[int, str]:
        return await answer(client, f"{BASE}/bookie", "PUT", json=body, headers=BEARER)

    await cluster.store.create(PATHS.recovery_delay, znodes.recovery_delay_to_bytes(0))
    faults: list[dict[str, Any]] = [
        {},
        {"bookie_src": []},
        {"bookie_src": [B3], "delete_cookie": "x"},
    ]
    for wrong in faults:
        assert (await ask(**wrong))[0] == 400
    await cluster.kill(B3)
    status, told = await ask(bookie_src=[B3, B2])
    assert (status, f"{B2} is still registered" in told) == (404, True)
    await cluster.kill(B2)
    sent = (200, "Success send recovery request command.")
    assert await ask(bookie_src=[B3, B2], bookie_dest=[B1], delete_cookie=True) == sent
    async with asyncio.timeout(10):
        for bookie in (B3, B2):
            path = f"{ROOT}/cookies/{bookie}"
            while await cluster.store.exists(path) is not None:  # noqa: ASYNC110  # no event
                await asyncio.sleep(0.05)


@over_http(bookies=(B1, B2, B3), has_token=True)
async def test_bookies_are_listed(client: Client, cluster: Cluster) -> None:
    path = "/api/v1/bookie/list_bookies"
    await cluster.unregister(B3)
    await cluster.register(B3, is_read_only=True)
    await cluster.unregister(B2)
    await cluster.register_at(B2, B1)
    assert await answer(client, path) == (200, to_json({B1: None, B2: None}))
    assert await answer(client, f"{path}?type=ro") == (200, to_json({B3: None}))
    named = await answer(client, f"{path}?print_hostnames=true")
    assert named == (200, to_json({B1: "b1", B2: "b1"}))


@over_http(bookies=(B1, B2, B3), has_token=True)
async def test_other_methods_are_answered_as_java_does(client: Client) -> None:
    told = "Not found method. Should be GET method"
    for method in ("PUT", "POST", "DELETE"):
        assert await answer(client, MARKED, method) == (404, told)
    told = "Not found method. Should be GET or PUT method"
    assert await answer(client, f"{BASE}/status", "POST") == (404, told)
