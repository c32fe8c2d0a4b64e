"""Draining on real bookies, while a Java client writes and Java's AutoRecovery runs."""

import asyncio
import json
from pathlib import Path

import pytest

from auditor.election import current_leader
from daemon.local.cluster import LocalCluster
from ledgers.model import BookieId
from replication.marks import marked_ledger_ids
from tests.cluster.beside_java import assert_whole, javas
from tests.cluster.bookies_in_trouble import (
    make_writable,
    status_file,
)
from tests.cluster.commands import bookmender
from tests.cluster.steps import Bench, bench, errors, nodes, shape, wait_for
from tests.java.messages import Shape as JavaShape
from tests.java.messages import Verdict
from tests.java.tool import JavaTool, JavaWriter

pytest_plugins = ["tests.java.fixtures"]
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(480)]
CLUSTER = {"bookies": 6}

OURS = {"REPLICATION_RETRY_MIN_S": "0.5", "REPLICATION_RETRY_MAX_S": "1"}
"""The settings retry ledgers soon, once their writer has closed them."""


async def is_drained(uri: str, *bookies: BookieId) -> bool:
    said = await bookmender(uri, "bookie", "drain", "-o", "json")
    drains = json.loads(said.out)["bookies"]
    return all(drains[bookie]["is_drained"] for bookie in bookies)


async def has_leader(on: Bench) -> bool:
    return await current_leader(on.seen.store, on.seen.paths) is not None


async def turn_read_only(cluster: LocalCluster, *bookies: BookieId) -> None:
    for bookie in bookies:
        await asyncio.to_thread(cluster.terminate, bookie)
        status_file(cluster, bookie).write_text("1,READ_ONLY,9999999999999\n")
        await asyncio.to_thread(cluster.start_bookie, bookie)
    assert cluster.read_only() == set(bookies)


async def test_rule_s16_two_bookies_are_drained_beside_java(
    module_cluster: LocalCluster, java: JavaTool, uri: str, tmp_path: Path
) -> None:
    """A Java client writes, and Java's AutoRecovery runs."""
    leaving = module_cluster.bookies[:2]

    async with (
        bench(uri) as on,
        nodes(uri, tmp_path) as start,
        javas(module_cluster) as start_javas,
    ):
        written = await on.write(*(shape(number) for number in range(30)))
        wide = JavaShape(ensemble_size=4, write_quorum=2, ack_quorum=2)

        async def have_left() -> bool:
            return not any([await on.names(written, bookie) for bookie in leaving])

        with await asyncio.to_thread(JavaWriter, uri, wide) as writer:
            await asyncio.to_thread(writer.wait_acknowledged, 20)
            await turn_read_only(module_cluster, *leaving)
            node = start("ours", settings=OURS)
            await wait_for(lambda: has_leader(on), "our leader")
            start_javas()

            said = await bookmender(uri, "bookie", "drain", *leaving)
            assert said.exit_code == 0, said
            await wait_for(have_left, "closed ledgers on other bookies")
            acknowledged = writer.last_acknowledged
            await asyncio.to_thread(writer.wait_acknowledged, acknowledged + 20)
            ended = await asyncio.to_thread(writer.stop)
            assert ended.error is None, ended

        waited = await bookmender(uri, "bookie", "drain", *leaving, "--wait")
        assert waited.exit_code == 0, waited
        live = await on.seen.manager.read(writer.ledger_id)
        assert not live.metadata.bookies.intersection(leaving)
        assert await is_drained(uri, *leaving)
        await asyncio.to_thread(assert_whole, java, uri, written)
        report = await asyncio.to_thread(java.judge, uri, [writer.ledger_id])
        assert report.verdict is Verdict.WHOLE, report
        assert not await marked_ledger_ids(on.seen.store, on.seen.paths.private)
        assert not errors(node)

        cancelled = await bookmender(uri, "bookie", "drain", *leaving, "--cancel")
        assert cancelled.exit_code == 0, cancelled
    for bookie in leaving:
        await asyncio.to_thread(make_writable, module_cluster, bookie)
