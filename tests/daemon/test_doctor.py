"""``bookmender doctor``: what each check finds."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from daemon.operations import doctor
from daemon.operations.doctor import (
    Finding,
    Level,
    bookie_findings,
    clock_finding,
    diagnose,
    diagnose_cluster,
    latency_finding,
    leader_finding,
    no_racks_finding,
    node_findings,
    server_findings,
    settings_findings,
    state_findings,
    worst,
)
from daemon.settings import HttpSettings, Settings, load_settings
from daemon.status.state import Services
from ledgers.clock import SystemClock
from ledgers.errors import BookmenderError, UnavailableError
from ledgers.model import BookieId
from ledgers.registration import BookieView, RegisteredBookie
from ledgers.security import SecuritySettings
from ledgers.zookeeper.servers import Server
from replication.nodes import NodeInfo, Role
from replication.settings import PlacementSettings
from replication.znodes import vote_to_bytes
from tests.daemon.visits import visiting
from tests.replication.cluster import Cluster, in_virtual_time, shut_out
from tests.replication.ledger_values import B1, B2
from tests.replication.nodes import PATHS, ROOT

Answers = Mapping[BookieId, float | BookmenderError]


def texts(found: list[Finding], level: Level) -> list[str]:
    return [each.text for each in found if each.level is level]


def by_check(found: list[Finding]) -> dict[str, Level]:
    return {name: worst(f for f in found if f.check == name) for name in {f.check for f in found}}


async def all_answer(view: BookieView) -> Answers:
    return dict.fromkeys(view.available, 0.001)


async def diagnosed(cluster: Cluster, *shut: str, writes: bool = False) -> list[Finding]:
    here = visiting(cluster)
    shut_out(here.store, *shut)
    return await diagnose_cluster(here, writes=writes, clock=cluster.clock, ask=all_answer)


async def cluster_with_node() -> Cluster:
    cluster = await Cluster.start()
    await cluster.store.create(f"{ROOT}/INSTANCEID", b"2744a558-86bd-4e1e-9310-96f2cf5590be")
    for role in (Role.AUDITOR, Role.WORKER):
        info = NodeInfo(role=role, host="host-a", pid=1, started_ms=0)
        await cluster.store.create(f"{PATHS.nodes}/{role.value}", info.to_json(), is_ephemeral=True)
    vote = f"{PATHS.election}/V_0000000001"
    await cluster.store.create(vote, vote_to_bytes("host-a"), is_ephemeral=True)
    return cluster


# --- A whole cluster ------------------------------------------------------------------------------


@in_virtual_time
async def test_a_healthy_cluster_is_ok_and_stays_unchanged() -> None:
    cluster = await cluster_with_node()
    written = await cluster.write_ledger((B1, B2))
    before = await _znodes(cluster)

    found = await diagnosed(cluster)

    assert texts(found, Level.WARN) == texts(found, Level.ERROR) == []
    assert await _znodes(cluster) == before
    assert (await cluster.manager.read(written.ledger_id)).version == written.version


async def _znodes(cluster: Cluster) -> dict[str, list[str]]:
    parents = (ROOT, PATHS.directory, PATHS.marks, PATHS.locks, PATHS.election, PATHS.nodes)
    return {path: sorted(await cluster.store.children(path)) for path in parents}


@in_virtual_time
async def test_with_write_the_clocks_are_compared_and_nothing_is_left() -> None:
    cluster = await cluster_with_node()
    before = await _znodes(cluster)

    found = await diagnosed(cluster, writes=True)

    assert "this host's clock is 0.0 s ahead of ZooKeeper's" in texts(found, Level.OK)
    assert await _znodes(cluster) == before


@in_virtual_time
async def test_trees_that_acls_hide_are_named() -> None:
    cluster = await cluster_with_node()

    found = await diagnosed(cluster, PATHS.locks)

    (told,) = [f for f in found if f.check == "read access"]
    assert told.level is Level.ERROR
    assert told.text.startswith(PATHS.locks)
    assert "setAcl" in (told.advice or "")


@in_virtual_time
async def test_a_check_that_hangs_does_not_hold_up_the_others() -> None:
    cluster = await cluster_with_node()
    began_s = cluster.clock.now_s()

    async def nobody_answers(view: BookieView) -> Answers:
        await asyncio.sleep(3600)
        return {}

    found = await diagnose_cluster(
        visiting(cluster), writes=False, clock=cluster.clock, ask=nobody_answers
    )

    assert cluster.clock.now_s() - began_s < 10
    assert by_check(found)["bookies"] is Level.ERROR
    assert by_check(found)["clock"] is Level.OK


def test_a_cluster_without_servers_is_diagnosed_too() -> None:
    settings = Settings(metadata_service_uri="zk://127.0.0.1:1/ledgers")

    found = asyncio.run(diagnose(settings, writes=False, clock=SystemClock()))

    assert [f.level for f in found if f.check == "zookeeper"] == [Level.ERROR, Level.ERROR]


def test_a_missing_file_of_security_is_no_problem_of_the_network() -> None:
    settings = Settings(
        metadata_service_uri="zk://127.0.0.1:1/ledgers",
        security=SecuritySettings(zookeeper_tls=True, ca_file="/nonexistent/ca.pem"),
    )

    found = asyncio.run(diagnose(settings, writes=False, clock=SystemClock()))

    error = found[-1]
    assert "/nonexistent/ca.pem" in error.text
    assert "[security]" in (error.advice or "")


# --- This host ------------------------------------------------------------------------------------


URI = "zk://zk:2181/ledgers"


def test_settings_that_cannot_work_are_found(tmp_path: Path) -> None:
    token_file = tmp_path / "token"
    token_file.write_text("long-enough-for-a-token")
    token_file.chmod(0o644)
    fighting = {"BOOKMENDER_METADATA_SERVICE_URI": URI, "BOOKMENDER_HOLD_SHARE": "1"}
    no_racks = PlacementSettings(racks_file="/does/not/exist")
    token = HttpSettings(token_file=str(token_file))

    def levels(settings: Settings) -> list[Level]:
        return [found.level for found in settings_findings(settings)]

    assert levels(Settings(metadata_service_uri=URI)) == [Level.OK]
    assert levels(load_settings(None, fighting)) == [Level.WARN]
    assert Level.ERROR in levels(Settings(metadata_service_uri=URI, placement=no_racks))
    assert levels(Settings(metadata_service_uri=URI, http=token)) == [Level.WARN], "all may read it"
    token_file.unlink()
    assert levels(Settings(metadata_service_uri=URI, http=token)) == [Level.ERROR]


def test_the_state_folder_must_be_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()

    assert state_findings(tmp_path / "new" / "state")[0].level is Level.OK
    assert state_findings(tmp_path / "file" / "state")[0].level is Level.ERROR
    (tmp_path / "left").mkdir()
    (tmp_path / "left" / "journal").touch()  # in the place of a folder: not even root may write
    assert state_findings(tmp_path / "left")[0].level is Level.ERROR
    monkeypatch.setattr(doctor, "FREE_BYTES_MIN", 1 << 62)
    assert state_findings(tmp_path)[0].level is Level.WARN


# --- ZooKeeper ------------------------------------------------------------------------------------


NEW, OLD = Server(version="3.9.5", mode="leader"), Server(version="3.5.10", mode="follower")
GONE = Server(error="connection refused")


@pytest.mark.parametrize(
    ("servers", "levels"),
    [
        pytest.param({"a": NEW}, [Level.OK], id="one that answers"),
        pytest.param({"a": GONE}, [Level.ERROR], id="the only one is gone"),
        pytest.param({"a": NEW, "b": GONE}, [Level.OK, Level.WARN], id="one of two is gone"),
        pytest.param({"a": OLD}, [Level.ERROR], id="too old"),
        pytest.param(
            {"a": NEW, "b": Server(version="3.8.4")},
            [Level.OK, Level.OK, Level.WARN],
            id="different versions",
        ),
        pytest.param({"a": Server()}, [Level.OK], id="it does not tell its version"),
    ],
)
def test_servers_are_judged(servers: dict[str, Server], levels: list[Level]) -> None:
    assert [each.level for each in server_findings(servers)] == levels


# --- Bookies --------------------------------------------------------------------------------------


def view_of(*bookies: BookieId, writable: bool = True) -> BookieView:
    registered = {
        bookie: RegisteredBookie(bookie_id=bookie, address=None, czxid=1, is_writable=writable)
        for bookie in bookies
    }
    return BookieView(writable=registered) if writable else BookieView(read_only=registered)


def test_bookies_are_judged_and_many_silent_ones_are_counted() -> None:
    bookies = [BookieId(f"bookie-{number}:3181") for number in range(30)]
    slow: dict[BookieId, Any] = {B1: 0.01, B2: 2.0}
    silent: dict[BookieId, Any] = dict.fromkeys(bookies, UnavailableError("no"))

    assert worst(bookie_findings(view_of(B1, B2), {B1: 0.01, B2: 0.02})) is Level.OK
    assert worst(bookie_findings(view_of(B1, B2), slow)) is Level.WARN
    found = bookie_findings(view_of(*bookies), silent)
    assert (worst(found), len(found)) == (Level.ERROR, 21)
    assert found[-1].text == "10 more bookies do not serve this host"
    (told,) = bookie_findings(view_of(B1), {B1: 0.01}, known=[B1, B2])
    assert told.text.startswith(f"1 of 2 bookies writable (not registered: {B2}); 1 answer")


@pytest.mark.parametrize(
    ("placed", "level"),
    [
        pytest.param((B1, B2), Level.OK, id="every bookie has a rack"),
        pytest.param((B1,), Level.WARN, id="one has none"),
        pytest.param(None, Level.ERROR, id="the source cannot be read"),
    ],
)
def test_the_racks_of_the_bookies_are_checked(
    tmp_path: Path, placed: tuple[BookieId, ...] | None, level: Level
) -> None:
    file = tmp_path / "racks"
    if placed is not None:
        file.write_text("".join(f"{bookie} = /rack-1\n" for bookie in placed))

    async def racks() -> list[Finding]:
        cluster = await Cluster.start(B1, B2)
        here = visiting(cluster)
        placement = replace(here.settings.placement, racks_file=str(file))
        settings = replace(here.settings, placement=placement)
        return await diagnose_cluster(
            replace(here, settings=settings), writes=False, clock=SystemClock(), ask=all_answer
        )

    assert by_check(asyncio.run(racks()))["racks"] is level


# --- Nodes ----------------------------------------------------------------------------------------


def node(role: Role, host: str, pid: int, bookie: str | None = None) -> NodeInfo:
    return NodeInfo(role=role, host=host, pid=pid, bookie_id=bookie, started_ms=0)


@pytest.mark.parametrize(
    ("nodes", "level"),
    [
        pytest.param(
            [node(role, host, 1) for role in (Role.WORKER, Role.AUDITOR) for host in "ab"],
            Level.OK,
            id="one on each host",
        ),
        pytest.param(
            [node(Role.WORKER, "a", 1), node(Role.WORKER, "a", 2)], Level.WARN, id="two on a host"
        ),
        pytest.param(
            [node(Role.WORKER, "a", 1, B1), node(Role.WORKER, "b", 2, B1)],
            Level.WARN,
            id="two with the same bookie",
        ),
        pytest.param(
            [node(Role.WORKER, "a", 1), node(Role.HAND, "a", 2), node(Role.HAND, "a", 3)],
            Level.OK,
            id="repairs by hand",
        ),
        pytest.param([node(Role.AUDITOR, "a", 1)], Level.WARN, id="no worker"),
    ],
)
def test_nodes_that_run_twice_are_found(nodes: list[NodeInfo], level: Level) -> None:
    assert worst(node_findings(nodes)) is level


@in_virtual_time
async def test_what_status_judges_is_judged_by_its_conditions() -> None:
    cluster = await Cluster.start(B1)
    await cluster.unregister(B1)
    await cluster.register(B1, is_read_only=True)

    found = await diagnosed(cluster)

    told = {f.text.partition(":")[0]: f.level for f in found if f.check == "cluster"}
    assert told["NO_AUDITOR"] is Level.WARN
    assert told["NO_WRITABLE_BOOKIES"] is Level.ERROR


OURS = Services(leader="host-a", leader_node=node(Role.AUDITOR, "host-a", 1))


@pytest.mark.parametrize(
    ("found", "level"),
    [
        (latency_finding(0.003), Level.OK),
        (latency_finding(0.2), Level.WARN),
        (latency_finding(2.0), Level.ERROR),
        (clock_finding(0.5), Level.OK),
        (clock_finding(-5.0), Level.WARN),
        (clock_finding(90.0), Level.ERROR),
        (no_racks_finding(is_unused=True), Level.WARN),
        (no_racks_finding(is_unused=False), Level.OK),
        (leader_finding(Services(leader="java"), java_count=1), Level.WARN),
        (leader_finding(OURS, java_count=2), Level.OK),
    ],
    ids=lambda value: value.text if isinstance(value, Finding) else value.name,
)
def test_what_was_measured_is_judged(found: Finding, level: Level) -> None:
    assert found.level is level
