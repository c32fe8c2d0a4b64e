"""The HTTP server of a real node: during a repair, without ZooKeeper, and beside Java's.

Each test leaves the cluster whole and the queue empty.
"""

import asyncio
import json
import re
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from daemon.local.cluster import LocalCluster
from daemon.local.processes import Child
from replication.marks import marked_ledger_ids
from tests.cluster.bookies_in_trouble import kill_and_expire
from tests.cluster.java_http import Answer, ask, java_http_server
from tests.cluster.steps import AUDITOR_ONLY, Bench, bench, errors, events, nodes, shape, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(360)]

TOKEN = "a-token-of-enough-length"
HTTP = {"HTTP_ENABLED": "true", "HTTP_PORT": "0"}
AUTORECOVERY = "/api/v1/autorecovery"
MARKED = f"{AUTORECOVERY}/list_under_replicated_ledger"
DELAY = f"{AUTORECOVERY}/lost_bookie_recovery_delay"
STATUS = f"{AUTORECOVERY}/status"
BOOKIES = "/api/v1/bookie/list_bookies"
SAME = (
    STATUS,
    MARKED,
    f"{MARKED}?printmissingreplica=true",
    f"{AUTORECOVERY}/who_is_auditor",
    BOOKIES,
    f"{BOOKIES}?type=ro",
    f"{BOOKIES}?type=rw&print_hostnames=true",
)


async def address_of(node: Child) -> str:
    """Return the address of the node's HTTP server."""
    (event,) = await wait_for(lambda: events(node, "http.listening"), "HTTP server")
    return f"http://127.0.0.1:{event['port']}"


@asynccontextmanager
async def serving_node(uri: str, folder: Path, **settings: str) -> AsyncIterator[tuple[Child, str]]:
    """Yield a node and the address of its HTTP server, once the node is ready."""
    token = folder / "token"
    token.write_text(TOKEN)
    async with nodes(uri, folder) as start:
        ours = {**HTTP, "HTTP_TOKEN_FILE": str(token), **settings}
        node = start("serving", settings=ours)
        base = await address_of(node)

        async def is_ready() -> bool:
            return (await ask(base, "/readyz"))[0] == 200

        await wait_for(is_ready, "readiness")
        yield node, base


async def wait_marked(on: Bench, ledger_ids: Sequence[int]) -> int:
    """Wait until these ledgers are marked, and until no further marks appear for ledgers of earlier
    tests. Return the number of marks."""
    before: list[int] = []

    async def are_all_marked() -> bool:
        nonlocal before
        then, before = before, await marked_ledger_ids(on.seen.store, on.seen.paths)
        return before == then and set(before) >= set(ledger_ids)

    await wait_for(are_all_marked, "marks")
    return len(before)


async def scrape(base: str) -> dict[str, float]:
    """Return the samples by name and labels."""
    status, text = await ask(base, "/metrics")
    assert status == 200
    return {
        f"{sample.name}{sorted(sample.labels.items()) or ''}": sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def read(base: str, name: str) -> Any:
    status, text = await ask(base, f"/api/v1/{name}")
    assert status == 200, text
    return json.loads(text)


def test_a_node_answers_while_it_repairs(
    module_cluster: LocalCluster, uri: str, tmp_path: Path
) -> None:
    victim = module_cluster.bookies[0]

    async def run() -> None:
        async with bench(uri) as on, serving_node(uri, tmp_path) as (node, base):
            written = await on.write(*(shape(number) for number in range(120)))
            at_risk = await on.names(written, victim)
            kill_and_expire(module_cluster, victim)
            seen, slowest_s, repair_began_s = [], 0.0, time.monotonic()
            repairing = asyncio.create_task(on.wait_repaired(written, victim))
            try:
                while not repairing.done():
                    began_s = time.monotonic()
                    seen.append(await scrape(base))
                    slowest_s = max(slowest_s, time.monotonic() - began_s)
                    status = await read(base, "status")
                    assert status["leader_node"]["pid"] == node.pid
                await repairing
                repair_s = time.monotonic() - repair_began_s
            finally:
                await asyncio.to_thread(module_cluster.start_bookie, victim)
            assert slowest_s < repair_s, "no answer waits for the end of the repair"
            assert {each["bookmender_leader"] for each in seen} == {1}
            await on.assert_whole(written)

            after = await scrape(base)
            assert after["bookmender_repairs_total[('outcome', 'done')]"] == len(at_risk)
            assert after["bookmender_marks_total[('cause', 'lost')]"] == len(at_risk)
            assert after["bookmender_repaired_bytes_total"] > 0
            assert after["bookmender_zookeeper_request_seconds_count"] > 100
            steps = "bookmender_repair_step_seconds_count[('step', '{}')]"
            assert after[steps.format("copy")] >= len(at_risk)
            assert after[steps.format("commit")] >= len(at_risk)
            assert (await read(base, "queue"))["marked"] == 0
            assert not errors(node)

    asyncio.run(run())


@pytest.mark.long(group="http")
def test_the_backlog_of_the_leader_is_measured(
    module_cluster: LocalCluster, uri: str, tmp_path: Path
) -> None:
    """Without a worker, so that it stays."""
    victim = module_cluster.bookies[0]

    async def run() -> None:
        async with bench(uri) as on, serving_node(uri, tmp_path, **AUDITOR_ONLY) as (_, base):
            written = await on.write(*(shape(number) for number in range(30)))
            at_risk = await on.names(written, victim)
            kill_and_expire(module_cluster, victim)
            try:
                marked = await wait_marked(on, at_risk)

                async def is_measured() -> bool:
                    size = (await read(base, "node"))["backlog"]
                    return bool(size and size["marked"] == marked and size["missing_bytes"])

                await wait_for(is_measured, "measurement")
                found = await scrape(base)
                left = "bookmender_underreplicated_ledgers[('copies_left', '{}')]"
                assert found[left.format("1")] == marked
                assert found[left.format("0")] == 0
                assert found["bookmender_queue_ledgers[('queue', 'shared')]"] == marked
                assert 0 < found["bookmender_oldest_mark_age_seconds"] < 60
                assert found["bookmender_unregistered_bookies[('state', 'lost')]"] == 1
                assert (await read(base, "queue"))["marked"] == marked
                async with nodes(uri, tmp_path) as start:
                    start("worker", settings={"AUDITOR_ENABLED": "false"})
                    await on.wait_repaired(written, victim)
            finally:
                await asyncio.to_thread(module_cluster.start_bookie, victim)
            await on.assert_whole(written)

    asyncio.run(run())


def test_without_zookeeper_the_node_lives_and_is_not_ready(
    make_cluster: Callable[..., LocalCluster], tmp_path: Path
) -> None:
    cluster = make_cluster(bookies=1)

    async def run() -> None:
        async with serving_node(cluster.metadata_service_uri, tmp_path) as (node, base):
            assert (await read(base, "conditions"))["health"] in ("OK", "WARN", "UNKNOWN")
            await asyncio.to_thread(cluster.kill_zookeeper)

            async def no_role_is_connected() -> bool:
                roles = json.loads((await ask(base, "/readyz"))[1])["roles"]
                return not any(each["is_connected"] for each in roles)

            await wait_for(no_role_is_connected, "end of the connections of both roles")
            status, text = await ask(base, "/readyz")
            assert status == 503
            assert "ZooKeeper does not answer" in json.loads(text)["problem"]
            assert (await ask(base, "/healthz"))[0] == 200
            assert (await scrape(base))["bookmender_role_ready[('role', 'worker')]"] == 0
            status, text = await ask(base, "/api/v1/bookies")
            assert status == 503, text
            await asyncio.to_thread(cluster.restart_zookeeper)

            async def is_ready() -> bool:
                return (await ask(base, "/readyz"))[0] == 200

            await wait_for(is_ready, "readiness")

            async def can_read() -> bool:
                return (await ask(base, "/api/v1/bookies"))[0] == 200

            await wait_for(can_read, "answer from the cluster")
            assert not errors(node)

    asyncio.run(run())


@pytest.mark.long(group="http")
def test_a_port_in_use_stops_no_repair(
    module_cluster: LocalCluster, uri: str, tmp_path: Path
) -> None:
    async def run() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            async with bench(uri) as on, nodes(uri, tmp_path) as start:
                node = start("node", settings={"HTTP_ENABLED": "true", "HTTP_PORT": str(port)})
                written = await on.write(*(shape(number) for number in range(10)))
                await on.lose(written)
                await on.wait_idle()
                await on.assert_whole(written)
                (failed,) = errors(node)
                assert (failed["event"], failed["port"]) == ("http.listen_failed", port)

    asyncio.run(run())


# --- Beside Java's server -------------------------------------------------------------------------


def comparable(answer: Answer) -> Any:
    """Java lists in the order of a hash map. The layout is compared apart from that."""
    status, text = answer
    if not text.startswith(("{", "[")):
        return status, text
    value = json.loads(text)
    layout = re.sub(r"\d+", "N", text).replace(",\n", "\n").splitlines()
    return status, sorted(value) if isinstance(value, list) else value, sorted(layout)


@pytest.mark.long(group="http")
def test_the_answers_equal_those_of_a_java_bookie(
    module_cluster: LocalCluster, uri: str, tmp_path: Path
) -> None:
    victim = module_cluster.bookies[0]
    folder = tmp_path / "java"
    folder.mkdir()

    async def run() -> None:
        async with (
            bench(uri) as on,
            java_http_server(module_cluster, folder) as java,
            serving_node(uri, tmp_path, **AUDITOR_ONLY) as (_, ours),
        ):

            async def assert_same(*paths: str) -> None:
                for path in paths:
                    theirs = comparable(await ask(java, path))

                    async def are_equal(path: str = path, theirs: Any = theirs) -> bool:
                        return bool(comparable(await ask(ours, path)) == theirs)

                    # Ours may be as old as a reading is served.
                    await wait_for(are_equal, f"{path}: {theirs}")

            await assert_same(*SAME, DELAY)

            written = await on.write(*(shape(number) for number in range(20)))
            at_risk = await on.names(written, victim)
            kill_and_expire(module_cluster, victim)
            try:
                await wait_marked(on, at_risk)
                others = module_cluster.bookies[1]
                await assert_same(
                    *SAME,
                    f"{MARKED}?missingreplica={victim}",
                    f"{MARKED}?missingreplica={others}",
                    f"{MARKED}?excludingmissingreplica={victim}",
                    f"{MARKED}?missingreplica={victim}&excludingmissingreplica={others}",
                )
            finally:
                await asyncio.to_thread(module_cluster.start_bookie, victim)
            async with nodes(uri, tmp_path) as start:
                start("worker", settings={"AUDITOR_ENABLED": "false"})
                await on.wait_repaired([], victim)

            for server, value in ((java, "false"), (ours, "true"), (ours, "false"), (java, "true")):
                path = f"{STATUS}?enabled={value}"
                answer = await ask(server, path, "PUT", body=b"", token=TOKEN)
                assert answer == (200, f'{{\n  "enabled" : {value}\n}}')
                await assert_same(STATUS)
                triggers = [
                    await ask(each, f"{AUTORECOVERY}/trigger_audit", "PUT", body=b"", token=TOKEN)
                    for each in (java, ours)
                ]
                assert triggers[0] == triggers[1], triggers

            for server, delay_s in ((java, 7), (ours, 11), (ours, 0)):
                body = json.dumps({"delay_seconds": delay_s}).encode()
                answer = await ask(server, DELAY, "PUT", body=body, token=TOKEN)
                assert answer == (200, f"Success set lostBookieRecoveryDelay to {delay_s}")
                await assert_same(DELAY)

            for method, path in (("POST", MARKED), ("DELETE", DELAY), ("POST", BOOKIES)):
                theirs = await ask(java, path, method, body=b"")
                status, _ = await ask(ours, path, method, body=b"")
                assert status == theirs[0] == 404

    asyncio.run(run())
