"""``bookmender doctor`` on a real cluster."""

import asyncio

import pytest
from kazoo.client import KazooClient
from kazoo.security import OPEN_ACL_UNSAFE, make_acl, make_digest_acl

from daemon.local.cluster import LocalCluster
from tests.cluster.commands import Said, bookmender
from tests.cluster.steps import bench, shape

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]
CLUSTER = {"bookies": 3}


def diagnose(uri: str, *options: str) -> Said:
    return asyncio.run(bookmender(uri, "doctor", "-o", "json", *options))


def levels(said: Said) -> dict[str, str]:
    """Return the last level of each check, which is the worst where it matters here."""
    return {each["check"]: each["level"] for each in said.record["findings"]}


def test_a_running_cluster_is_ok(module_cluster: LocalCluster, uri: str) -> None:
    said = diagnose(uri, "--write")

    found = levels(said)
    assert said.exit_code == 1  # no node runs, and the tests have a short time-out to connect
    warned = {check for check, level in found.items() if level != "OK"}
    assert warned == {"cluster", "nodes", "settings"}
    assert f"{len(module_cluster.bookies)} answer" in said.out


@pytest.mark.long(group="commands")
def test_a_bookie_that_hangs_is_an_error(module_cluster: LocalCluster, uri: str) -> None:
    victim = module_cluster.bookies[0]
    module_cluster.pause(victim)
    try:
        said = diagnose(uri)
    finally:
        module_cluster.resume(victim)

    errors = [each["text"] for each in said.record["findings"] if each["level"] == "ERROR"]
    assert len(errors) == 1
    assert errors[0].startswith(f"{victim} is registered, but does not serve this host")


@pytest.mark.long(group="commands")
@pytest.mark.parametrize("protected", ["a tree", "a ledger"])
def test_what_cannot_be_written_is_an_error(
    module_cluster: LocalCluster, uri: str, protected: str
) -> None:
    """ZooKeeper checks the ACL of the first write before it refuses the rest of the transaction."""
    zookeeper = KazooClient(hosts=module_cluster.zookeeper_address)
    zookeeper.start()
    path = "/ledgers/underreplication/locks"
    zookeeper.ensure_path(path)
    if protected == "a ledger":
        path = asyncio.run(write_one(uri))
    before = zookeeper.get(path)[1].version
    try:
        zookeeper.set_acls(
            path,
            [make_digest_acl("admin", "secret", all=True), make_acl("world", "anyone", read=True)],
        )
        said = diagnose(uri)
    finally:
        zookeeper.add_auth("digest", "admin:secret")
        zookeeper.set_acls(path, OPEN_ACL_UNSAFE)
        after = zookeeper.get(path)[1].version
        names = zookeeper.get_children("/ledgers/underreplication")
        if protected == "a ledger":
            zookeeper.delete(path)
        zookeeper.stop()
        zookeeper.close()

    found = levels(said)
    assert (found["read access"], found["write access"]) == ("OK", "ERROR")
    assert before == after
    assert not [name for name in names if name.startswith("doctor")]


async def write_one(uri: str) -> str:
    """Write a ledger, and return the path of its znode."""
    async with bench(uri) as on:
        (written,) = await on.write(shape(0, quorums=(2, 2, 2)))
        return on.seen.manager.path(written.ledger_id)
