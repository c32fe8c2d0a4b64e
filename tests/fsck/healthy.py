"""Healthy ledgers, created in all the ways that exist."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from daemon.local.cluster import LocalCluster
from tests.cluster.beside_java import javas
from tests.cluster.our_client import our_client
from tests.cluster.steps import WORKER_ONLY, bench, nodes, shape
from tests.java import messages
from tests.java.tool import JavaTool, JavaWriter
from tests.workload import shapes

QUORUMS = ((3, 3, 2), (4, 2, 2), (3, 2, 1), (2, 2, 2))
REPAIRED, RECOVERED = 10, 4
"""The number of ledgers of each kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Healthy:
    """Ids of healthy ledgers. ``by_java`` and ``by_us``: closed by their writers."""

    by_java: tuple[int, ...]
    by_us: tuple[int, ...]
    repaired: tuple[int, ...]
    recovered: tuple[int, ...]

    @property
    def ledger_ids(self) -> list[int]:
        return [*self.by_java, *self.by_us, *self.repaired, *self.recovered]


def make_healthy(cluster: LocalCluster, java: JavaTool, folder: Path, *, count: int) -> Healthy:
    """Create about ``count`` ledgers with changed ensembles, most by Java and some by us.

    Some are repaired by us and some by Java's AutoRecovery; some are recovered by us and some by
    Java's client.
    """
    uri = cluster.metadata_service_uri
    by_java = [each.ledger for each in java.write(uri, *_java_shapes(count // 2))]
    left_open = messages.Shape(count=2 * RECOVERED, ack_quorum=2, close=False)
    recovered = [each.ledger for each in java.write(uri, left_open)]
    for ledger_id in recovered[:RECOVERED]:
        java.read(uri, ledger_id, with_recovery=True)
    by_us, repaired = asyncio.run(_ours(cluster, folder, count // 2, recovered[RECOVERED:]))
    return Healthy(
        by_java=tuple(by_java),
        by_us=tuple(by_us),
        repaired=tuple(repaired),
        recovered=tuple(recovered),
    )


def _java_shapes(count: int) -> Iterator[messages.Shape]:
    digests = ("CRC32C", "CRC32", "MAC", "DUMMY")
    for quorums, digest in zip(QUORUMS, digests, strict=True):
        ensemble_size, write_quorum, ack_quorum = quorums
        yield messages.Shape(
            ensemble_size=ensemble_size,
            write_quorum=write_quorum,
            ack_quorum=ack_quorum,
            digest=digest,
            sizes=(100, 0, 5_000),
            count=count // len(QUORUMS),
        )


async def _ours(
    cluster: LocalCluster, folder: Path, count: int, to_recover: list[int]
) -> tuple[list[int], list[int]]:
    """Return the ids of ledgers as we wrote them, and of those that were repaired."""
    uri = cluster.metadata_service_uri
    async with bench(uri) as on:
        wanted = shapes(count, quorums=QUORUMS)
        written = await on.write(*(s for s in wanted if s.metadata_version == 3))
        mended = await on.write(*(shape(n, quorums=(3, 3, 2)) for n in range(2 * REPAIRED)))
        await on.lose(mended[:REPAIRED])
        async with nodes(uri, folder) as start:
            start("worker", settings=WORKER_ONLY)
            await on.wait_idle()
        await on.lose(mended[REPAIRED:])
        async with javas(cluster) as start_java:
            start_java()
            await on.wait_idle()
    async with our_client(uri) as client:
        for ledger_id in to_recover:
            await client.recover(ledger_id)
    return [each.ledger_id for each in written], [each.ledger_id for each in mended]


@contextmanager
def writing(uri: str) -> Iterator[JavaWriter]:
    """Run a writer that adds entries all the time."""
    with JavaWriter(uri, messages.Shape(ack_quorum=2), window=4, pause_ms=2) as writer:
        writer.wait_acknowledged(20)
        yield writer
