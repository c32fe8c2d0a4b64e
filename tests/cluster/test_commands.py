"""Output and exit codes of the commands on a real cluster."""

import asyncio
import socket
from asyncio import gather
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from kazoo.client import KazooClient
from kazoo.security import OPEN_ACL_UNSAFE, make_digest_acl

from daemon.local.cluster import LocalCluster
from daemon.local.ports import LOOPBACK, free_ports
from daemon.words import counted
from ledgers.model import BookieId
from tests.cluster.bookies_in_trouble import kill_and_expire
from tests.cluster.commands import bookmender, has_condition
from tests.cluster.steps import AUDITOR_ONLY, WORKER_ONLY, bench, nodes, shape, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]
CLUSTER = {"bookies": 3}

ON_TWO, ON_ALL = (2, 2, 2), (3, 3, 2)


# --- A lost bookie --------------------------------------------------------------------------------


async def test_commands_report_a_lost_bookie_until_it_returns(
    module_cluster: LocalCluster, uri: str, tmp_path: Path
) -> None:
    victim = module_cluster.bookies[0]

    async with bench(uri) as on, nodes(uri, tmp_path) as start:
        written = await on.write(*(shape(number, quorums=ON_TWO) for number in range(8)))
        (everywhere,) = await on.write(shape(8, quorums=ON_ALL))
        at_risk = [*sorted(await on.names(written, victim)), everywhere.ledger_id]
        auditor = start("auditor", settings=AUDITOR_ONLY)
        kill_and_expire(module_cluster, victim)
        try:
            await wait_for(lambda: on.has_marked(at_risk), "marks")
            await assert_repairing(uri, at_risk, victim=victim, leader_pid=auditor.pid)

            start("worker", settings=WORKER_ONLY)
            await wait_for(lambda: on.has_marked(at_risk[-1:]), "queue with a single ledger")
            await assert_blocked(uri, everywhere.ledger_id, victim=victim)
        finally:
            await asyncio.to_thread(module_cluster.start_bookie, victim)
        await on.wait_idle()
        status, queue = await gather(bookmender(uri, "status"), bookmender(uri, "queue"))
        assert (status.exit_code, queue.exit_code) == (0, 0)
        assert status.out.splitlines()[0] == "OK  All ledgers are whole."
        assert "3 writable, 0 read-only, 0 lost" in status.out
        assert queue.out == "0 ledgers marked\n"


async def assert_repairing(
    uri: str, at_risk: list[int], *, victim: BookieId, leader_pid: int
) -> None:
    """Assert what the commands say of marked ledgers.

    No worker runs, so the queue does not change.
    """
    ledger_id = str(at_risk[0])
    status, status_json, queue, queue_json, ledger, ledger_json = await gather(
        bookmender(uri, "status"),
        bookmender(uri, "status", "-o", "json"),
        bookmender(uri, "queue", "--limit", "1"),
        bookmender(uri, "queue", "-o", "json"),
        bookmender(uri, "ledger", "show", ledger_id),
        bookmender(uri, "ledger", "show", ledger_id, "-o", "json"),
    )

    assert status.exit_code == status_json.exit_code == 1
    assert status.out.startswith("WARN  BOOKIES_LOST, NO_WORKERS, LEDGERS_UNDER_REPLICATED")
    assert f"leader    {socket.gethostname()} (pid {leader_pid})" in status.out
    assert f"{victim} lost: " in status.out
    assert f"{counted(len(at_risk), 'ledger')}: {len(at_risk):,} not tried yet" in status.out
    found = status_json.record
    assert found["health"] == "WARN"
    assert found["leader_node"]["pid"] == leader_pid
    assert [node["role"] for node in found["nodes"]] == ["auditor"]
    assert found["bookies"]["lost"] == [victim]
    assert len(found["bookies"]["writable"]) == 2
    assert found["queue"]["by_missing_bookie"] == {victim: len(at_risk)}

    assert queue.exit_code == queue_json.exit_code == 1
    _, first, total = queue.out.splitlines()
    assert first.split()[0] == ledger_id
    assert f"misses {victim} [lost for " in first
    assert total.startswith(f"{counted(len(at_risk), 'ledger')} marked")
    assert queue_json.record["marked"] == len(at_risk)
    listed = {row["ledger_id"]: row["missing"] for row in queue_json.record["ledgers"]}
    assert listed == {ledger_id: [victim] for ledger_id in at_risk}

    assert ledger.exit_code == ledger_json.exit_code == 0
    assert f"ledger {ledger_id}: CLOSED, last entry 19, 2000 bytes" in ledger.out
    assert f"{victim} (absent)" in ledger.out
    (segment,) = ledger_json.record["segments"]
    assert segment["absent"] == [victim]


async def assert_blocked(uri: str, ledger_id: int, *, victim: BookieId) -> None:
    """Assert what the commands say of one ledger that every registered bookie stores already."""
    await wait_for(lambda: is_blocked(uri, ledger_id, "no-target"), "reason in the status")
    status, queue = await gather(bookmender(uri, "status"), bookmender(uri, "queue"))
    assert (status.exit_code, queue.exit_code) == (1, 1)
    assert status.out.startswith("ERROR  REPAIRS_BLOCKED, ")
    assert "add a bookie" in status.out
    assert f"misses {victim} [lost for " in queue.out
    assert " — no-target: no bookie may" in queue.out


async def is_blocked(uri: str, ledger_id: int, reason: str) -> bool:
    """Return True if status has this reason for the ledger and no repair is under way."""
    status = (await bookmender(uri, "status", "-o", "json")).record
    waiting = [(note["ledger_id"], note["reason"]) for note in status["waiting"]["ledgers"]]
    return has_condition(status, "REPAIRS_BLOCKED", "ERROR") and (ledger_id, reason) in waiting


# --- A wrong URI, or denied access ----------------------------------------------------------------

Commands = Sequence[str]
DAEMON: Commands = ("daemon",)
COMMANDS: Commands = ("daemon", "status")


async def assert_refused(
    uri: str | None, commands: Commands, state: Path, *, exit_code: int, complaint: str
) -> None:
    for said in await gather(*(bookmender(uri, command, state=state) for command in commands)):
        # A daemon has a log as well.
        (line,) = [line for line in said.err.splitlines() if line.startswith("bookmender: ")]
        assert complaint in line
        assert (said.out, said.exit_code) == ("", exit_code)


def test_a_wrong_address_is_refused_in_one_line(
    module_cluster: LocalCluster, tmp_path: Path
) -> None:
    (port,) = free_ports(1)
    zookeeper, nobody = module_cluster.zookeeper_address, f"{LOOPBACK}:{port}"
    for address, exit_code, complaint in (
        (f"zk+hierarchical://{zookeeper}/nowhere", 3, "no BookKeeper cluster at /nowhere"),
        (f"zk+flat://{zookeeper}/ledgers", 2, "says flat, but the cluster"),
        (f"etcd://{zookeeper}/ledgers", 2, "the metadata store etcd is not supported"),
        (None, 2, "metadata_service_uri is not set"),
        (f"zk+hierarchical://{nobody}/ledgers", 3, f"nothing listens at {nobody}"),
    ):
        asyncio.run(
            assert_refused(address, COMMANDS, tmp_path, exit_code=exit_code, complaint=complaint)
        )


@pytest.mark.parametrize(
    ("path", "commands"),
    [
        pytest.param("/ledgers/LAYOUT", COMMANDS, id="the cluster"),
        pytest.param("/ledgers/available", COMMANDS, id="the bookies"),
        pytest.param("/ledgers/underreplication", DAEMON, id="the queue, which commands may read"),
    ],
)
def test_a_denied_znode_is_reported_in_one_line(
    module_cluster: LocalCluster, uri: str, tmp_path: Path, path: str, commands: Commands
) -> None:
    complaint = (
        "ACL of this znode denies access. Check security.zookeeper_user; or a user with permission "
        "can change the ACL with setAcl (see getAcl) "
        f"(path={path}"
    )

    with only_for_another(module_cluster, path):
        asyncio.run(assert_refused(uri, commands, tmp_path, exit_code=3, complaint=complaint))


async def test_a_repair_by_hand_ends_if_its_mark_is_denied(
    module_cluster: LocalCluster, uri: str, tmp_path: Path
) -> None:
    async with bench(uri) as on:
        shut, other = [w.ledger_id for w in await on.write(shape(1), shape(2))]
        marked = await bookmender(uri, "repair", str(shut), "--mark-only", state=tmp_path)
        assert marked.exit_code == 0, marked

        with only_for_another(module_cluster, on.seen.paths.private.mark(shut)):
            listed = await bookmender(uri, "queue", state=tmp_path)
            said = await bookmender(uri, "repair", str(shut), str(other), state=tmp_path)

        unread = "its mark cannot be read, so no node leases it: ZooKeeper's ACL"
        assert unread in listed.out, listed
        assert said.exit_code == 1, said
        first, last = said.out.splitlines()
        assert first.startswith(f"ledger {shut}: its mark cannot be read: ZooKeeper's ACL")
        assert last == "1 ledger checked and whole"
        opened = await bookmender(uri, "repair", str(shut), state=tmp_path)
        assert opened.exit_code == 0, opened


@contextmanager
def only_for_another(cluster: LocalCluster, path: str) -> Iterator[None]:
    """Restrict a znode to a digest identity that is not ours."""
    other = KazooClient(cluster.zookeeper_address, auth_data=[("digest", "other:secret")])
    other.start()
    try:
        other.ensure_path(path)  # our daemon has not run yet if this is the first test
        other.set_acls(path, [make_digest_acl("other", "secret", all=True)])
        yield
    finally:
        other.set_acls(path, OPEN_ACL_UNSAFE)
        other.stop()
        other.close()
