"""Delete ZooKeeper's data under load, and lose no acknowledged entry: ``make restore-demo``.

Java's client writes ledgers, and goes on with some of them, while a node archives the metadata.
Then ZooKeeper is killed and its data deleted; the bookies are stopped; another ZooKeeper starts,
and the archive is restored into it. The bookies start, and collect garbage several times a second.
In the end Java's client must read every entry that was acknowledged to it, a new ledger must get a
new id, and fsck must find every copy.

Exit code 0: all that is so; 1: it is not; 2: a program is missing.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import time
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from archive.places import open_place
from archive.reading import Archive
from daemon.local.cluster import LocalCluster
from daemon.local.jars import BOOKKEEPER_DEFAULT
from daemon.local.java import Java
from ledgers.errors import BookmenderError
from tests.cluster.commands import bookmender
from tests.cluster.steps import nodes, wait_for
from tests.demo import Say, SurpriseError, logs_kept, run_demo, teller
from tests.java.build import compiled_classes
from tests.java.messages import Expected, Shape
from tests.java.tool import JavaTool, JavaWriter

BOOKIES = 4
GARBAGE_S = 0.5
SETTINGS = {"gcWaitTime": "500", "gcOverreplicatedLedgerWaitTime": "500"}
CLOSED = [
    Shape(ensemble_size=3, write_quorum=3, ack_quorum=2, count=100, seed=1),
    Shape(ensemble_size=3, write_quorum=2, ack_quorum=2, count=60, seed=2, close=False),
]
LATE = Shape(count=20, seed=3)
WRITERS = 3
COLLECTIONS = 20
"""Garbage collections that the restored cluster must survive."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="make restore-demo ARGS=")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("build/restore-demo"),
        help="folder for the logs after a failure",
    )
    options = parser.parse_args()
    run_demo("restore-demo", partial(restore_and_read, options.output.resolve()))


def restore_and_read(output: Path) -> None:
    """Run the demonstration. ``output``: for the logs after a failure. Raises SurpriseError."""
    compiled_classes(BOOKKEEPER_DEFAULT, Java.find())  # an error without compiler comes at once
    say = teller()
    with TemporaryDirectory(prefix="restore-demo-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        with logs_kept(folder, output):
            say(f"starting ZooKeeper and {BOOKIES} bookies, which collect garbage all the time")
            with LocalCluster.start(
                folder / "cluster",
                bookies=BOOKIES,
                bookie_settings=SETTINGS,
                session_timeout_s=4.0,
            ) as cluster:
                asyncio.run(_run_on(cluster, folder, say))
    say("done: every acknowledged entry is there")


async def _run_on(cluster: LocalCluster, folder: Path, say: Say) -> None:
    uri, url = cluster.metadata_service_uri, f"file://{folder / 'archive'}"
    with JavaTool() as java:
        expected = await asyncio.to_thread(java.write, uri, *CLOSED)
        say(f"Java's client has written {len(expected)} ledgers; {WRITERS} are being written")
        writers = [
            JavaWriter(uri, Shape(ack_quorum=2, seed=100 + i), pause_ms=5) for i in range(WRITERS)
        ]
        async with nodes(uri, folder) as start_node:
            start_node("node")
            await _command(uri, "feed", "enable")
            await _command(uri, "archive", "enable", "--to", url)
            expected += await asyncio.to_thread(java.write, uri, LATE)
            known = {each.ledger for each in expected} | {each.ledger_id for each in writers}
            place = open_place(url)
            await wait_for(lambda: known <= _archived(Archive(place)), "the archive")
            say(f"a node has archived the metadata of {len(known)} ledgers")

            cluster.kill_zookeeper()
            acknowledged = {each.ledger_id: each.kill() for each in writers}
        say("ZooKeeper is killed, and its data deleted; then the bookies are stopped")
    for bookie in cluster.bookies:
        cluster.kill(bookie)
    shutil.rmtree(cluster.data / "zookeeper")
    cluster.restart_zookeeper()
    say("another ZooKeeper has started, which is empty")
    await _restore(uri, url, say)

    cluster.start_bookies(cluster.bookies)
    say(f"the bookies have started, and collect garbage {COLLECTIONS} times")
    await asyncio.sleep(COLLECTIONS * GARBAGE_S)
    with JavaTool() as java:
        _check(java, uri, expected, acknowledged)
        say(f"Java's client reads every entry of {len(expected) + len(acknowledged)} ledgers")
        (new,) = await asyncio.to_thread(java.write, uri, Shape(seed=9))
        if new.ledger <= max(known):
            raise SurpriseError(f"the id {new.ledger} was given twice")
        say(f"a new ledger has the id {new.ledger}")
    await _command(uri, "enable")
    report = await bookmender(uri, "fsck", "run", "--output", str(folder / "fsck"))
    if report.exit_code != 0:
        raise SurpriseError(f"fsck: {report.out}{report.err}")
    say("fsck finds every copy")


async def _restore(uri: str, url: str, say: Say) -> None:
    planned = await _command(uri, "archive", "restore", "cluster", "--from", url)
    for line in planned.splitlines():
        say(f"  {line}")
    began_s = time.monotonic()
    restored = await _command(uri, "archive", "restore", "cluster", "--from", url, "--yes")
    say(f"{restored.splitlines()[0]} ({time.monotonic() - began_s:.1f} s)")


def _archived(archive: Archive) -> set[int]:
    try:
        records = archive.state(archive.point(is_exact=False))
        return {record.ledger_id for record in records if record.ledger_id is not None}
    except BookmenderError:
        return set()


def _check(
    java: JavaTool, uri: str, expected: list[Expected], acknowledged: dict[int, int]
) -> None:
    for each in expected:
        content = java.read(uri, each.ledger, with_recovery=True)
        if (content.last, content.sha256) != (each.last, each.sha256):
            raise SurpriseError(f"ledger {each.ledger}: {content}, and expected was {each}")
    for ledger_id, last in acknowledged.items():
        content = java.read(uri, ledger_id, with_recovery=True)
        if content.last is None or content.last < last:
            raise SurpriseError(
                f"ledger {ledger_id} ends at entry {content.last}, and {last} was acknowledged"
            )


async def _command(uri: str, *arguments: str) -> str:
    said = await bookmender(uri, *arguments)
    if said.exit_code != 0:
        raise SurpriseError(f"bookmender {' '.join(arguments)}: {said.out}{said.err}")
    return said.out


if __name__ == "__main__":
    main()
