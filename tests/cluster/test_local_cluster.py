"""The local cluster itself: real servers, started and broken."""

import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from kazoo.client import KazooClient

from daemon.local import ports
from daemon.local.cluster import LocalCluster
from daemon.local.processes import wait_until
from daemon.local.spec import port_of
from daemon.local.status import ClusterStatus, status_of
from ledgers.errors import SettingsError, UnavailableError
from ledgers.model import BookieId
from tests.cluster.conftest import SESSION_TIMEOUT_S, MakeCluster

pytestmark = pytest.mark.cluster

CLUSTER = {"bookies": 4, "session_timeout_s": SESSION_TIMEOUT_S}
TIMEOUT_S = 60.0
RSS_BYTES_MAX = 200 << 20


def wait_for(condition: Callable[[], bool]) -> None:
    wait_until(condition, [], timeout_s=TIMEOUT_S)


def znode(cluster: LocalCluster, path: str) -> bytes:
    client = KazooClient(cluster.zookeeper_address)
    client.start()
    try:
        return bytes(client.get(path)[0])
    finally:
        client.stop()
        client.close()


def observe(cluster: LocalCluster) -> ClusterStatus:
    return status_of(cluster.spec, cluster.data, cluster)


def states(cluster: LocalCluster) -> list[str]:
    return [bookie.state for bookie in observe(cluster).bookies]


def test_every_bookie_is_writable_and_small_after_the_start(
    module_cluster: LocalCluster,
) -> None:
    status = observe(module_cluster)

    assert status.is_whole
    assert module_cluster.writable() == frozenset(module_cluster.bookies)
    assert all(not ports.is_free(port_of(bookie)) for bookie in module_cluster.bookies)
    assert not any(answers_beyond_loopback(port_of(bookie)) for bookie in module_cluster.bookies)
    assert all(0 < (bookie.rss_bytes or 0) <= RSS_BYTES_MAX for bookie in status.bookies)


@pytest.mark.long(group="local")
def test_zookeeper_reports_its_number_of_requests(module_cluster: LocalCluster) -> None:
    before = int(module_cluster.zookeeper_monitor()["zk_packets_received"])

    module_cluster.writable()

    assert int(module_cluster.zookeeper_monitor()["zk_packets_received"]) > before


def test_a_killed_bookie_is_registered_until_its_session_expires(
    module_cluster: LocalCluster,
) -> None:
    bookie = module_cluster.bookies[0]

    module_cluster.kill(bookie)

    assert module_cluster.pid(bookie) is None
    assert ports.is_free(port_of(bookie))
    assert bookie in module_cluster.writable()
    wait_for(lambda: bookie not in module_cluster.writable())

    module_cluster.start_bookie(bookie)
    assert observe(module_cluster).is_whole


@pytest.mark.long(group="local")
def test_a_terminated_bookie_deletes_its_registration(module_cluster: LocalCluster) -> None:
    bookie = module_cluster.bookies[2]  # not one that has just started, because that may hang

    assert module_cluster.terminate(bookie)

    wait_for(lambda: bookie not in module_cluster.writable())

    module_cluster.start_bookie(bookie)
    assert observe(module_cluster).is_whole


@pytest.mark.long(group="local")
def test_a_bookie_that_does_not_end_in_time_is_killed(module_cluster: LocalCluster) -> None:
    bookie = module_cluster.bookies[2]

    assert not module_cluster.terminate(bookie, timeout_s=0)

    assert module_cluster.pid(bookie) is None
    module_cluster.start_bookie(bookie)


def test_a_killed_bookie_restarts_after_its_former_session(
    module_cluster: LocalCluster,
) -> None:
    bookie = module_cluster.bookies[1]
    files = {path.name for path in bookie_folder(module_cluster, bookie).rglob("*.txn")}
    module_cluster.kill(bookie)

    module_cluster.start_bookie(bookie)  # at once, while the znode of the former session exists

    assert observe(module_cluster).is_whole
    assert files <= {path.name for path in bookie_folder(module_cluster, bookie).rglob("*.txn")}


@pytest.mark.long(group="local")
def test_a_bookie_restarts_though_its_old_session_lasts_too_long(
    module_cluster: LocalCluster,
) -> None:
    bookie = module_cluster.bookies[1]
    assert module_cluster.terminate(bookie)
    wait_for(lambda: bookie not in module_cluster.writable())
    client = KazooClient(module_cluster.zookeeper_address)
    client.start()
    try:
        client.create(f"/ledgers/available/{bookie}", ephemeral=True)

        module_cluster.start_bookie(bookie)  # otherwise it would wait, give up, and hang

        assert observe(module_cluster).is_whole
    finally:
        client.stop()
        client.close()


def test_a_wiped_bookie_can_start_empty(module_cluster: LocalCluster) -> None:
    bookie = module_cluster.bookies[2]
    keepsake = bookie_folder(module_cluster, bookie) / "ledgers" / "current" / "keepsake"
    keepsake.touch()

    module_cluster.wipe(bookie)
    assert module_cluster.pid(bookie) is None
    module_cluster.start_bookie(bookie)

    assert not keepsake.exists()
    assert observe(module_cluster).is_whole


@pytest.mark.long(group="local")
def test_a_paused_bookie_loses_its_session(
    module_cluster: LocalCluster,
) -> None:
    """Its port still accepts connections."""
    bookie = module_cluster.bookies[3]

    module_cluster.pause(bookie)

    assert not ports.is_free(port_of(bookie))
    wait_for(lambda: states(module_cluster)[3] == "unregistered")

    module_cluster.resume(bookie)
    wait_for(lambda: observe(module_cluster).is_whole)


@pytest.mark.long(group="local")
def test_bookies_survive_a_restart_of_zookeeper(module_cluster: LocalCluster) -> None:
    pids = [module_cluster.pid(bookie) for bookie in module_cluster.bookies]

    module_cluster.kill_zookeeper()
    assert set(states(module_cluster)) == {"unknown"}
    module_cluster.restart_zookeeper()

    wait_for(lambda: observe(module_cluster).is_whole)
    assert [module_cluster.pid(bookie) for bookie in module_cluster.bookies] == pids


def test_an_unknown_bookie_is_refused(module_cluster: LocalCluster) -> None:
    with pytest.raises(SettingsError, match=module_cluster.bookies[0]):
        module_cluster.kill(BookieId("127.0.0.1:1"))


def test_a_folder_has_one_owner_at_a_time(module_cluster: LocalCluster) -> None:
    with pytest.raises(SettingsError, match="running already"):
        LocalCluster.start(module_cluster.data)

    assert observe(module_cluster).is_whole


@pytest.mark.long(group="local")
def test_javas_autorecovery_is_elected(module_cluster: LocalCluster) -> None:
    election = "/ledgers/underreplication/auditorelection"

    daemon = module_cluster.start_autorecovery("recoverer")

    client = KazooClient(module_cluster.zookeeper_address)
    client.start()
    try:
        wait_for(lambda: bool(client.exists(election) and client.get_children(election)))
    finally:
        client.stop()
        client.close()
        daemon.terminate()
    assert daemon.wait(timeout_s=TIMEOUT_S)


@pytest.mark.long(group="local")
def test_a_restarted_cluster_keeps_ports_data_and_added_bookies(
    make_cluster: MakeCluster,
) -> None:
    first = make_cluster(bookies=1)
    added = first.add_bookie()
    instance = znode(first, "/ledgers/INSTANCEID")
    first.kill(first.bookies[0])  # its znode still exists when ZooKeeper is back
    first.stop()

    with LocalCluster.start(first.data) as second:
        assert second.bookies == (*first.bookies[:1], added)
        assert observe(second).is_whole
        assert second.metadata_service_uri == first.metadata_service_uri
        assert znode(second, "/ledgers/INSTANCEID") == instance


@pytest.mark.long(group="local")
def test_a_used_port_is_reported_before_the_start(make_cluster: MakeCluster) -> None:
    (port,) = ports.free_ports(1)
    with (
        socket.create_server((ports.LOOPBACK, port)),
        pytest.raises(SettingsError, match=f"port {port} of ZooKeeper"),
    ):
        make_cluster(bookies=1, zookeeper_port=port)


@pytest.mark.long(group="local")
def test_a_failed_start_shows_the_end_of_the_bookies_log(
    make_cluster: MakeCluster, tmp_path: Path
) -> None:
    with pytest.raises(UnavailableError, match=r"(?s)bookie-\d+ ended.*NoSuchStorage"):
        make_cluster(bookies=1, bookie_settings={"ledgerStorageClass": "NoSuchStorage"})


@pytest.mark.long(group="local")
@pytest.mark.usefixtures("_prerequisites")
def test_no_process_is_left_when_the_owner_is_killed(tmp_path: Path) -> None:
    code = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from daemon.local.cluster import LocalCluster\n"
        "cluster = LocalCluster.start(Path(sys.argv[1]), bookies=1)\n"
        "print(cluster.zookeeper_pid, cluster.pid(cluster.bookies[0]), flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        pids = owner.stdout.readline().split()
        assert len(pids) == 2

        owner.kill()

    wait_for(lambda: not any(is_alive(pid) for pid in pids))


def answers_beyond_loopback(port: int) -> bool:
    """Return True if the server listens on every interface; only then 127.0.0.2 answers (Linux)."""
    with socket.socket() as connection:
        connection.settimeout(1)
        return connection.connect_ex(("127.0.0.2", port)) == 0


def is_alive(pid: str) -> bool:
    """Return True if the process runs.

    A zombie that was not reaped, as in a container, does not.
    """
    found = subprocess.run(
        ["ps", "-o", "stat=", "-p", pid], capture_output=True, text=True, check=False
    )
    return found.stdout.strip()[:1] not in ("", "Z")


def bookie_folder(cluster: LocalCluster, bookie: BookieId) -> Path:
    return cluster.data / "bookies" / str(port_of(bookie))
