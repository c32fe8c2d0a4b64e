"""The state of a cluster over HTTP: every answer is as /api/v1/openapi.json describes it."""

import asyncio
import gzip
import json
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from auditor.checks.records import CheckRecord, CheckRun
from daemon.admin_session import order_event
from daemon.cli import history as history_command
from daemon.http import api, app
from daemon.http.endpoints import ENDPOINTS
from daemon.http.endpoints import Kind as EndpointKind
from daemon.http.openapi import describe
from daemon.operations.history import EventRecord
from daemon.operations.holds import begin_hold
from daemon.operations.maintenance import open_window
from daemon.role_state import NodeService, RoleState
from daemon.settings import Settings
from daemon.threads import ServiceThread
from ledgers.clock import SystemClock
from ledgers.errors import UnavailableError
from replication.history import Event, Kind, RecordedHistory, record_order
from replication.reasons import Blocked, Facts, Reason
from replication.znodes import Mark, mark_to_bytes, vote_to_bytes
from tests.auditor.auditing import auditing
from tests.auditor.scenes import delayed, with_ledgers
from tests.daemon.http.serving import (
    BEARER,
    URI,
    Client,
    EpochClock,
    checked,
    over_http,
    serving,
)
from tests.daemon.in_memory import InMemory
from tests.daemon.status_values import note
from tests.daemon.visits import order_drain, visiting
from tests.replication.cluster import Cluster, until
from tests.replication.ledger_values import B1, B2, B3, B4
from tests.replication.nodes import PATHS

READS = [
    each.path
    for each in ENDPOINTS
    if each.method == "GET"
    and each.kind in (EndpointKind.API, EndpointKind.JAVA)
    and each.name != "openapi"
]


async def trouble(cluster: Cluster) -> None:
    """A bit of everything that can be wrong or ordered."""
    here = visiting(cluster)
    await cluster.kill(B1)
    await cluster.unregister(B2)
    await cluster.register(B2, is_read_only=True)
    for ledger_id, bookies in ((1, (B1,)), (2, (B1, B3)), (3, (B1,))):
        await cluster.mark(*bookies, ledger_id=ledger_id)
    await cluster.store.create(PATHS.private.mark(7), mark_to_bytes(Mark()), with_parents=True)
    await cluster.store.create(PATHS.mark(4), b"\xff", with_parents=True)
    await cluster.store.create(PATHS.disable)
    await cluster.store.create(PATHS.lock(3), b"x", is_ephemeral=True)
    await cluster.store.create(f"{PATHS.election}/V_0000000003", vote_to_bytes("java:3181"))
    await order_drain(cluster, B2)
    clock = SystemClock()
    await open_window(here, B4, duration_s=3_600, reason="new disks", clock=clock)
    await begin_hold(here, duration_s=60, reason="switch", clock=clock)
    async with cluster.node("host-b") as worker:
        for ledger_id, reason in ((1, Reason.NO_TARGET), (2, Reason.NO_COPY)):
            blocked = Blocked(
                reason=reason,
                facts=Facts(absent=(B1,), entry_count=3),
                besides=(Blocked(reason=Reason.NO_ANSWER),),
            )
            await worker.notes.put(replace(note(ledger_id, reason), blocked=blocked))


@over_http()
async def test_every_answer_of_an_empty_cluster_is_as_described(client: Client) -> None:
    """``test_contract`` asks a cluster in trouble."""
    for path in READS:
        for _ in range(2):  # the second one is from the cache
            await checked(await client.get(path), path)


def test_the_answers_of_a_leader_s_cluster_are_as_described() -> None:
    async def run() -> None:
        cluster = await with_ledgers((B1, B2), (B2, B3), (B1, B3))
        async with auditing(cluster, settings=delayed(3_600)) as leader:
            run = CheckRun(started_ms=1, finished_ms=2, ledger_count=3, counts={"lost": 1})
            record = CheckRecord(last_ms=2, last=run, running=run)
            await cluster.store.create(PATHS.check("replicas"), record.to_json(), with_parents=True)

            async def has_seen_loss() -> bool:
                return leader.auditor.tracker.is_loss_pending

            await cluster.kill(B1)
            await until(cluster, has_seen_loss)
            async with serving(cluster) as client:
                for path in READS:
                    await checked(await client.get(path), path)
                status = await checked(await client.get("/api/v1/status"), "/api/v1/status")

        assert status["leader_node"]["role"] == "auditor"
        bookies = status["bookies"]
        assert [*bookies["absent"], *bookies["lost"]] == [B1]

    asyncio.run(run())


@over_http(trouble)
async def test_the_parts_agree_with_the_status(client: Client) -> None:
    names = ("status", "conditions", "blocked", "queue", "bookies", "hold")
    found = {name: await (await client.get(f"/api/v1/{name}")).json() for name in names}

    status = found["status"]
    assert found["conditions"]["conditions"] == status["conditions"]
    assert found["conditions"]["health"] == status["health"] == "WARN"
    assert found["blocked"]["by_reason"] == {"no-copy": 1, "no-target": 1}
    assert found["blocked"]["count"] == status["waiting"]["count"]
    assert found["queue"]["marked"] == status["queue"]["total"] == 5
    assert [row["ledger_id"] for row in found["queue"]["ledgers"]] == [1, 2, 3, 4, 7]
    assert [row["is_private"] for row in found["queue"]["ledgers"]] == [False] * 4 + [True]
    assert {row["bookie_id"] for row in found["bookies"]["bookies"]} >= {B1, B2, B4}
    assert found["hold"]["hold"] == status["hold"]


async def long_queue(cluster: Cluster) -> None:
    for ledger_id in range(1_010):
        await cluster.mark(B1, ledger_id=ledger_id)


@over_http(long_queue)
async def test_the_queue_shows_the_first_thousand(client: Client) -> None:
    found = await (await client.get("/api/v1/queue")).json()

    assert (found["marked"], len(found["ledgers"])) == (1_010, 1_000)


# --- History --------------------------------------------------------------------------------------

HISTORY = "/api/v1/history"
FULL_EVENT = Event(
    kind=Kind.CHECK_FINISHED,
    at_ms=EpochClock().wall_ms() - 3 * 3_600_000,
    until_ms=EpochClock().wall_ms() - 3 * 3_600_000,
    bookies=(B1,),
    ledger_id=7,
    since_ms=1,
    ends_ms=2,
    last_entry_id=3,
    cause="replicas",
    counts={"marked": 2},
    reason="<b>",
)


async def some_history(cluster: Cluster) -> None:
    orders = [order_event("repair", ledger_id=ledger_id, by="me@host") for ledger_id in (1, 2)]
    for event in (FULL_EVENT, *orders):
        await record_order(cluster.store, PATHS, node="host-a", events=[event])
    await cluster.store.create(f"{PATHS.history}/rubbish", b"{")


@pytest.fixture
def printed(in_memory: InMemory, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the history that the command prints."""
    monkeypatch.setattr(api, "SystemClock", EpochClock)
    monkeypatch.setattr(history_command, "SystemClock", EpochClock)
    result, _ = in_memory(history_command.history, "-o", "json", prepare=some_history)
    return json.loads(result.stdout)


@over_http(some_history)
async def test_the_history_is_that_of_the_command(client: Client, printed: Any) -> None:
    found = await checked(await client.get(HISTORY), HISTORY)

    assert [event["kind"] for event in found["events"]] == ["check-finished", "order", "order"]
    assert without_stamps(found) == without_stamps(printed)


def without_stamps(record: dict[str, Any]) -> dict[str, Any]:
    """Return the record without the times of orders, which are those of their znodes."""
    events = [each | {"at_ms": 0 if each["order"] else each["at_ms"]} for each in record["events"]]
    return record | {"events": events}


@pytest.mark.parametrize(
    ("query", "count", "omitted"),
    [
        ("", 3, 0),
        ("since=7d", 3, 0),
        ("since=2h", 2, 0),
        ("limit=2", 2, 1),
        ("kind=order", 2, 0),
        ("kind=order&kind=check-finished", 3, 0),
        ("kind=finding", 0, 0),
    ],
)
@over_http(some_history)
async def test_the_history_is_chosen_by_its_parameters(
    client: Client, query: str, count: int, omitted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "SystemClock", EpochClock)

    found = await checked(await client.get(f"{HISTORY}?{query}"), HISTORY)

    assert (len(found["events"]), found["omitted"]) == (count, omitted)


@pytest.mark.parametrize(
    ("query", "why"),
    [
        ("since=", "not a duration"),
        ("since=-2h", "not a duration"),
        ("since=0s", "too short"),
        ("since=8d", "at most 7d"),
        (f"since={'9' * 5_000}d", "too long"),
        ("limit=0", "from 1 to 1000"),
        ("limit=1001", "from 1 to 1000"),
        ("limit=%C2%B2", "from 1 to 1000"),
        (f"limit={'9' * 5_000}", "from 1 to 1000"),
        ("kind=", "one of bookie-lost"),
        ("kind=order&kind=x", "one of bookie-lost"),
    ],
)
@over_http()
async def test_a_wrong_parameter_of_the_history_is_refused(
    client: Client, query: str, why: str
) -> None:
    answer = await client.get(f"{HISTORY}?{query}")
    assert answer.status == 400
    assert why in (await checked(answer, HISTORY))["error"]


@over_http()
async def test_all_periods_of_the_history_share_two_readings(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    async def read(store: Any, paths: Any, since_ms: int) -> RecordedHistory:
        seen.append(since_ms)
        return RecordedHistory()

    monkeypatch.setattr(api, "read_history", read)
    for since in ("1s", "2h", "24h", "25h", "7d"):
        assert (await client.get(f"{HISTORY}?since={since}")).status == 200

    assert len(seen) == 2


def test_the_described_event_has_the_fields_of_an_event() -> None:
    described = {field.name for field in msgspec.structs.fields(EventRecord)}

    added = {"node", "text"}
    assert described == {*added, *(field.name for field in msgspec.structs.fields(Event))}


# --- Who may ask, how much and how often ----------------------------------------------------------


@over_http()
async def test_another_host_in_the_header_is_refused(client: Client) -> None:
    for path in ("/api/v1/status", "/metrics", "/healthz"):
        response = await client.get(path, headers={"Host": "evil.example"})
        assert response.status == 403
        assert "Host header" in (await response.json())["error"]


@over_http(has_token=True, address="0.0.0.0")
async def test_reading_from_elsewhere_needs_the_token_and_health_does_not(client: Client) -> None:
    elsewhere = {"X-Forwarded-For": "10.0.0.9"}
    assert (await client.get("/healthz", headers=elsewhere)).status == 200
    assert (await client.get("/metrics", headers=elsewhere)).status == 200
    refused = await client.get("/api/v1/status", headers=elsewhere)
    assert (refused.status, refused.headers["WWW-Authenticate"]) == (401, "Bearer")
    await checked(refused, "/api/v1/status")
    assert (await client.get("/api/v1/status", headers=elsewhere | BEARER)).status == 200


@over_http(has_token=True, address="0.0.0.0")
async def test_over_loopback_reading_is_open_whatever_the_listening_address(
    client: Client,
) -> None:
    assert (await client.get("/api/v1/status")).status == 200
    assert (await client.get("/api/v1/status", headers={"Host": "evil.example"})).status == 401
    assert (await client.get("/metrics", headers={"Host": "bookie-1"})).status == 200


@over_http()
async def test_too_many_requests_at_a_time_are_refused(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def slow(cluster: Any, **options: Any) -> Any:
        await asyncio.sleep(0.2)
        return [], []

    monkeypatch.setattr(app, "REQUESTS_MAX", 2)
    monkeypatch.setattr(api, "gather_bookies", slow)
    answers = await asyncio.gather(*(client.get("/api/v1/bookies") for _ in range(5)))
    for answer in answers:
        await checked(answer, "/api/v1/bookies")
    later = await client.get("/api/v1/bookies")

    assert sorted(answer.status for answer in answers) == [200, 200, 503, 503, 503]
    assert later.status == 200


@pytest.fixture
def _no_time_for_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "REQUEST_S", 0.05)


@pytest.mark.usefixtures("_no_time_for_requests")
@over_http()
async def test_a_request_that_takes_too_long_ends(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def slow(cluster: Any, **options: Any) -> Any:
        await asyncio.sleep(60)

    monkeypatch.setattr(api, "gather_bookies", slow)

    answer = await client.get("/api/v1/bookies")
    assert answer.status == 503
    assert "too long" in (await checked(answer, "/api/v1/bookies"))["error"]


@over_http()
async def test_without_zookeeper_the_answer_says_so(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def gone(cluster: Any) -> Any:
        raise UnavailableError("no ZooKeeper server answers")

    monkeypatch.setattr(api, "gather_status", gone)

    answer = await client.get("/api/v1/conditions")
    assert (answer.status, answer.headers["Retry-After"]) == (503, "2")
    told = await checked(answer, "/api/v1/conditions")
    assert told["error"].startswith("no ZooKeeper server answers")
    assert (await client.get("/metrics")).status == 200


@over_http()
async def test_a_defect_is_told_as_such_and_stops_nothing(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: Any, **options: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(api, "node_record", broken)

    answer = await client.get("/api/v1/node")
    assert answer.status == 500
    assert "defect" in (await checked(answer, "/api/v1/node"))["error"]
    assert (await client.get("/healthz")).status == 200


def test_a_leadership_may_end_while_the_node_is_described() -> None:
    class Ending(RoleState):
        """A state whose leadership ends after it was looked at once."""

        @property  # type: ignore[override]
        def backlog(self) -> object:
            self.look_count = getattr(self, "look_count", 0) + 1
            return SimpleNamespace(size=None) if self.look_count == 1 else None

        @backlog.setter
        def backlog(self, value: object) -> None:
            pass

    thread = ServiceThread("auditor", partial(asyncio.sleep, 0))
    services = [NodeService(thread=thread, state=Ending("auditor"))]

    record = api.node_record(Settings(metadata_service_uri=URI), services, started_ms=1)

    assert record.backlog is None


@over_http()
async def test_unknown_paths_and_methods_are_answered_as_json(client: Client) -> None:
    unknown = await client.get("/api/v1/nothing")
    assert (unknown.status, "openapi.json" in (await unknown.json())["error"]) == (404, True)
    wrong = await client.post("/api/v1/status")
    assert (wrong.status, wrong.headers["Allow"]) == (405, "GET,HEAD")
    assert "error" in await wrong.json()


@over_http(has_token=True)
async def test_a_large_body_is_refused(client: Client) -> None:
    body = b"x" * (app.BODY_BYTES_MAX + 1)
    for data, headers in ((body, {}), (gzip.compress(body), {"Content-Encoding": "gzip"})):
        answer = await client.post("/api/v1/hold", data=data, headers=BEARER | headers)
        assert answer.status == 413
        assert f"at most {app.BODY_BYTES_MAX:,} bytes" in (await answer.json())["error"]
        await checked(answer, "/api/v1/hold")


# --- The description ------------------------------------------------------------------------------


@over_http()
async def test_the_description_is_served_and_names_every_path(client: Client) -> None:
    served = await (await client.get("/api/v1/openapi.json")).json()

    assert served == json.loads(json.dumps(describe()))
    assert set(served["paths"]) == {each.path for each in ENDPOINTS}
