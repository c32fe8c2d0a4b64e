"""Observe mode on a real ZooKeeper: it leaves no trace, and it agrees with Java's auditor."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from kazoo.client import KazooClient

from daemon.local.cluster import LocalCluster
from daemon.local.processes import Child, stop_all
from daemon.local.writing import PASSWORD
from ledgers.digest import EntryDigest
from ledgers.model import BookieId
from tests.cluster.beside_java import javas
from tests.cluster.bookies_in_trouble import kill_and_expire
from tests.cluster.commands import bookmender
from tests.cluster.steps import STOP_TIMEOUT_S, Bench, bench, errors, events, nodes, shape, wait_for
from tests.cluster.test_mixed_cluster import wait_leader
from tests.workload import Ending, Written

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]
CLUSTER = {"bookies": 4}

OBSERVE = {"NODE_MODE": "observe"}
LEDGERS = 6
ON_ALL = (4, 2, 2)
"""Ledgers on every bookie: without a possible target, marks stay."""


@contextmanager
def a_loss(cluster: LocalCluster) -> Iterator[str]:
    """Make a bookie absent for a while, and yield it."""
    victim = cluster.bookies[0]
    kill_and_expire(cluster, victim)
    try:
        yield victim
    finally:
        cluster.start_bookie(victim)


def test_rule_s9_observing_changes_no_znode_and_fences_nothing(
    module_cluster: LocalCluster, uri: str, tmp_path: Path
) -> None:
    async def run() -> None:
        async with bench(uri) as on, nodes(uri, tmp_path) as start:
            await on.write(*(shape(number, quorums=ON_ALL) for number in range(LEDGERS - 1)))
            [unclosed] = await on.write(shape(LEDGERS, quorums=ON_ALL, ending=Ending.ABANDONED))
            with a_loss(module_cluster) as victim:
                before = whole_tree(on)

                said = await bookmender(uri, "plan", "--all", "--json")
                node = start("observer", settings=OBSERVE)
                report = await wait_for(lambda: logged(node, would_mark=LEDGERS), "log event")
                await wait_for(lambda: events(node, "observe.would_repair"), "planned repairs")
                await asyncio.to_thread(stop_all, [node], timeout_s=STOP_TIMEOUT_S)

                assert whole_tree(on) == before
                assert said.exit_code == 1, said
                [missing] = said.record["bookies"]["affected"]
                assert (missing["bookie"], missing["ledgers"]) == (victim, LEDGERS)
                assert said.record["marks"]["unmarked"] == LEDGERS
                assert len(said.record["would_repair"]["ledgers"]) == LEDGERS
                assert report["bookies"] == {victim: "lost"}
                assert report["unmarked"] == LEDGERS
                assert events(node, "observe.would_repair")[-1]["planned_count"] == LEDGERS
                assert errors(node) == []
                await assert_unfenced(on, unclosed, module_cluster.bookies[1:])

    asyncio.run(run())


async def assert_unfenced(on: Bench, written: Written, bookies: Sequence[BookieId]) -> None:
    """Assert that the writer could add another entry."""
    digest = EntryDigest(written.shape.digest_type, PASSWORD)
    entry = digest.pack(
        ledger_id=written.ledger_id,
        entry_id=written.acknowledged,
        lac=written.acknowledged - 1,
        length=0,
        payload=b"",
    )
    for bookie in bookies:
        await on.workload.bookies.add(bookie, entry, master_key=digest.master_key)


@pytest.mark.long(group="audit")
def test_observing_agrees_with_the_marks_of_javas_auditor(
    module_cluster: LocalCluster, uri: str, tmp_path: Path
) -> None:
    async def run() -> None:
        async with (
            bench(uri) as on,
            javas(module_cluster) as start_java,
            nodes(uri, tmp_path) as start,
        ):
            start_java()
            await wait_leader(on, is_java=True)
            written = await on.write(*(shape(number, quorums=ON_ALL) for number in range(LEDGERS)))
            node = start("observer", settings=OBSERVE)
            await wait_for(lambda: logged(node, would_mark=0), "log event before the loss")
            with a_loss(module_cluster):
                at_risk = [ledger.ledger_id for ledger in written]

                def agree() -> Any:
                    report = logged(node)
                    return report and report["agreed"] >= len(at_risk) and report

                report = await wait_for(agree, "agreement with Java's auditor")
                assert report["unmarked"] == report["surplus"] == 0
                assert report["would_mark"] == report["shared"]
                said = await bookmender(uri, "plan", "--all", "--json")
                assert said.record["marks"]["agreed"] == report["agreed"]
                assert said.record["marks"]["unmarked"] == said.record["marks"]["surplus"] == 0
                reasons = {
                    blocked["reason"]
                    for ledger in said.record["would_repair"]["ledgers"]
                    if ledger["ledger_id"] in at_risk
                    for blocked in ledger["blocked"]
                }
                assert reasons == {"no-target"}
            assert await on.seen.store.exists(on.seen.paths.private.directory) is None
            await on.wait_idle()  # Java finds them whole again

    asyncio.run(run())


def logged(node: Child, **fields: object) -> dict[str, Any] | None:
    """Return the node's last ``observe.would_mark`` if it has these fields."""
    complete = [each for each in events(node, "observe.would_mark") if each["is_complete"]]
    return complete[-1] if complete and fields.items() <= complete[-1].items() else None


def whole_tree(on: Bench) -> dict[str, tuple[int, int, int, bytes]]:
    """Return every znode with the transactions that created and changed it."""
    client = KazooClient(on.seen.settings.uri.hosts)
    client.start()
    try:
        tree, paths = {}, ["/"]
        while paths:
            path = paths.pop()
            data, stat = client.get(path)
            tree[path] = (stat.czxid, stat.mzxid, stat.pzxid, data)
            paths += [f"{path.rstrip('/')}/{name}" for name in client.get_children(path)]
        return tree
    finally:
        client.stop()
        client.close()
