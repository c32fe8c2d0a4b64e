"""How fast a client of the change feed catches up, compared with a client of etcd:
``python -m bench.feed_catch_up``.

Both clients are Python, on the same machine in the same run, in turn, and were away while 100,000
objects changed, each change in a transaction of its own. The time counts from connecting until the
last change was handled. The peers:

- etcd's watch from a revision: the way to follow etcd. It tells every revision.
- etcd's list of the keys changed since a revision, in one reply. It is fast, but it tells no
  deletions, so a client cannot follow with it alone.

Values in etcd have 16 bytes, about what the feed tells of a change. The log is in real bookies, and
its last ledger is open.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import click

from bench.etcd import PREFIX, EtcdClient, find_etcd, running_etcd
from bench.feed_takeover import FIRST_ID, TIMEOUT_S, WRITES_AT_ONCE, Ground, open_ground
from checkpoints.chain import read_chain
from checkpoints.client import open_client
from checkpoints.model import CommittedVersion
from checkpoints.stores.sql import SqlReceiptStore
from ledgers.errors import BookmenderError, UnavailableError
from ledgers.store import ANY_VERSION
from tests.znode_cluster import PATHS, ZnodeCluster

CHANGES, REPEATS = 100_000, 3
VALUE_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class CatchUpFigures:
    """Times in seconds, of all repeats. ``checkpoint_count``: in which the changes came."""

    change_count: int
    checkpoint_count: int
    feed_s: tuple[float, ...]
    watch_s: tuple[float, ...]
    list_s: tuple[float, ...]

    @property
    def times_the_watch(self) -> float:
        """Our rate over that of etcd's watch."""
        return median(self.watch_s) / median(self.feed_s)

    @property
    def times_the_list(self) -> float:
        return median(self.list_s) / median(self.feed_s)

    def text(self) -> str:
        rates = (
            f"{name} {median(times_s):.2f} s ({self.change_count / median(times_s):,.0f}/s)"
            for name, times_s in (
                ("the feed", self.feed_s),
                ("etcd's watch", self.watch_s),
                ("etcd's list", self.list_s),
            )
        )
        return (
            f"{self.change_count:,} changes, in {self.checkpoint_count:,} checkpoints: "
            f"{', '.join(rates)}; {self.times_the_watch:.1f} times the rate of the "
            f"watch, {self.times_the_list:.2f} times that of the list"
        )


async def measure_catch_up(
    etcd: Path,
    change_count: int = CHANGES,
    *,
    repeats: int = REPEATS,
    say: Callable[[str], None] = lambda text: None,
) -> CatchUpFigures:
    """``etcd``: the server's program (``find_etcd``). Raises UnavailableError."""
    say("starting ZooKeeper and the bookies, creating the ledgers")
    async with open_ground(change_count) as ground:
        with tempfile.TemporaryDirectory(prefix="bench-catch-up-") as name:
            folder = Path(name)
            with running_etcd(folder, etcd) as address:
                say("changing the ledgers")
                start_id = await _fill_feed(ground, change_count)
                say("changing the keys of etcd")
                revisions = await asyncio.to_thread(_fill_etcd, address, change_count)
                feed_s, watch_s, list_s = [], [], []
                for repeat in range(repeats + 1):  # the first one warms up
                    say(f"catching up, {repeat} of {repeats}")
                    feed_s.append(
                        await _follow_feed(ground, folder / f"{repeat}.db", start_id, change_count)
                    )
                    watch_s.append(
                        await asyncio.to_thread(_watch, address, revisions, change_count)
                    )
                    list_s.append(await asyncio.to_thread(_list, address, revisions, change_count))
        checkpoint_count = len(await ground.checkpoints_after(start_id))
    return CatchUpFigures(
        change_count=change_count,
        checkpoint_count=checkpoint_count,
        feed_s=tuple(feed_s[1:]),
        watch_s=tuple(watch_s[1:]),
        list_s=tuple(list_s[1:]),
    )


class Handler:
    """Handles changes, for either side: it remembers the latest version of each object."""

    def __init__(self) -> None:
        self.versions: dict[bytes, int] = {}

    def handle(self, key: bytes, version: int, is_deleted: bool) -> None:
        self.versions[key] = version

    async def receive(self, committed: CommittedVersion) -> None:
        self.handle(committed.key, committed.version, committed.is_deleted)


# --- The feed -------------------------------------------------------------------------------------


async def _fill_feed(ground: Ground, change_count: int) -> int:
    """Publish all ledgers, then change each of them. Return the id of the last checkpoint before
    the changes."""
    await ground.scan()
    await ground.enable()
    manager = ZnodeCluster(ground.writer).manager
    last_zxid = 0

    async def change(ledger_id: int) -> None:
        nonlocal last_zxid
        path = manager.path(ledger_id)
        data, _ = await ground.writer.get(path)
        stat = await ground.writer.set(path, data, version=ANY_VERSION)
        last_zxid = max(last_zxid, stat.mzxid)

    async with ground.leading() as leader:
        await leader.wait_published(change_count)
        start_id = await ground.last_id()
        for start in range(0, change_count, WRITES_AT_ONCE):
            part = ground.ledger_ids[start : start + WRITES_AT_ONCE]
            await asyncio.gather(*map(change, part))
        async with asyncio.timeout(TIMEOUT_S):
            while await ground.last_id() < last_zxid:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
    return start_id


async def _follow_feed(ground: Ground, receipts: Path, start_id: int, change_count: int) -> float:
    """Catch up as a client whose receipts end with ``start_id``, and return the time it took."""
    store, uri = f"sqlite:///{receipts}", ground.cluster.metadata_service_uri
    chain = (await read_chain(ground.store, PATHS)).value
    assert chain is not None
    before = await SqlReceiptStore.open(store, client="bench", generation=chain.generation)
    await before.store_low_watermark(start_id)
    await before.close()
    handler = Handler()
    began_s = time.perf_counter()
    async with open_client(uri, name="bench", store=store) as client:
        for committed in await client.service.subscribe(handler):
            handler.handle(committed.key, committed.version, committed.is_deleted)
        took_s = time.perf_counter() - began_s
    _require(len(handler.versions), change_count, "the feed")
    return took_s


# --- etcd -----------------------------------------------------------------------------------------


def _fill_etcd(address: str, change_count: int) -> tuple[int, int]:
    """Put keys like those of ledgers twice, and return the first and the last revision of the
    second time."""
    client = EtcdClient(address)
    try:
        first = client.put_all(_pairs(change_count)) + 1
        return first, client.put_all(_pairs(change_count))
    finally:
        client.close()


def _pairs(count: int) -> Iterable[tuple[bytes, bytes]]:
    for number in range(count):
        yield PREFIX + b"%010d" % (FIRST_ID + number), number.to_bytes(VALUE_BYTES, "big")


def _watch(address: str, revisions: tuple[int, int], change_count: int) -> float:
    handler, began_s = Handler(), time.perf_counter()
    client = EtcdClient(address)
    try:
        client.watch(*revisions, handler.handle)
        took_s = time.perf_counter() - began_s
    finally:
        client.close()
    _require(len(handler.versions), change_count, "etcd's watch")
    return took_s


def _list(address: str, revisions: tuple[int, int], change_count: int) -> float:
    handler, began_s = Handler(), time.perf_counter()
    client = EtcdClient(address)
    try:
        client.list_changed(revisions[0], handler.handle)
        took_s = time.perf_counter() - began_s
    finally:
        client.close()
    _require(len(handler.versions), change_count, "etcd's list")
    return took_s


def _require(count: int, wanted: int, what: str) -> None:
    if count != wanted:
        raise UnavailableError(f"{what} told {count:,} objects of {wanted:,}")


@click.command()
@click.option("--changes", default=CHANGES, show_default=True)
@click.option("--repeat", default=REPEATS, show_default=True)
@click.option("--etcd", type=click.Path(path_type=Path), help="The program. Default: on the PATH.")
def main(changes: int, repeat: int, etcd: Path | None) -> None:
    """Measure how fast a client that was away learns what changed, compared with etcd."""
    began_s = time.monotonic()

    def say(text: str) -> None:
        click.echo(f"[{time.monotonic() - began_s:6.1f} s] {text}", err=True)

    try:
        program = find_etcd(etcd)
        figures = asyncio.run(measure_catch_up(program, changes, repeats=repeat, say=say))
    except BookmenderError as error:
        raise click.ClickException(str(error)) from error
    click.echo(figures.text())


if __name__ == "__main__":
    main()
