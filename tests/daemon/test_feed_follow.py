"""``bookmender feed follow`` and the commands about clients, on a cluster in memory."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import click
import msgspec
import pytest
from click.testing import CliRunner

from checkpoints import client as client_module
from checkpoints.chain import order_change
from checkpoints.client import IN_ZOOKEEPER, ClusterConnection, connected_names, open_client_table
from checkpoints.log import CheckpointLog
from checkpoints.model import CommittedVersion, ledger_key
from checkpoints.receipts import DELETED, FENCED, ClientTable
from checkpoints.recovery import LiftReason, RecoveryService, WatermarkLift
from checkpoints.stores import zookeeper as zookeeper_stores
from checkpoints.stores.zookeeper import ZooKeeperReceiptStore
from daemon.cli import feed as feed_command
from daemon.cli import feed_follow
from daemon.cli.feed_follow import (
    RECONNECT_S,
    RETRY_CHECK_S,
    Change,
    Follower,
    FollowOptions,
    FollowRun,
    HandlingFailedError,
    follow,
    lift_text,
    printing,
    running,
    watch_reader,
)
from daemon.cli.main import EXIT_FENCED, cli
from daemon.operations.feed import FeedFollower, Lag, lag_of
from ledgers.errors import (
    ClientDeletedError,
    ClientFencedError,
    NoAnswerError,
    SessionLostError,
    SettingsError,
)
from ledgers.reading import OpenedLedger
from replication.znodes import ensure_znode
from tests.checkpoints.feed_cluster import BOOKIES, ROOT, FeedCluster
from tests.daemon.feeds import CLIENT, client_with_failure, feed, pass_time
from tests.daemon.in_memory import InMemory
from tests.ledgers.hooked_bookies import Call, nothing
from tests.memory.store import MemoryStore
from tests.replication.cluster import Cluster, in_virtual_time
from tests.replication.nodes import PATHS
from tests.said import Said

NAME = CLIENT


class Run:
    """One process that follows the feed. ``fails``: ledgers that cannot be handled."""

    def __init__(self, cluster: FeedCluster, *, fails: set[int] | None = None) -> None:
        self._cluster = cluster
        self.fails = set() if fails is None else fails
        self.handled: list[Change] = []
        self.told: list[str] = []
        self.run = FollowRun()

    @property
    def ledger_ids(self) -> list[int]:
        return [change.ledger_id for change in self.handled]

    async def handle(self, change: Change) -> str | None:
        self.handled.append(change)
        return "disk full" if change.ledger_id in self.fails else None

    async def follow(self, **options: object) -> int:
        store = MemoryStore(self._cluster.tree)
        try:
            await follow(
                self.connection(store),
                FollowOptions(name=NAME, **options),  # type: ignore[arg-type]
                self.handle,
                tell=self.told.append,
                run=self.run,
                clock=self._cluster.clock,
                bookies=self._cluster.bookies,
            )
            return len(self.run.failed)
        finally:
            await store.close()

    @asynccontextmanager
    async def following(self, **options: object) -> AsyncIterator[None]:
        """Follow until the end of the block, which is as sudden as kill -9 for the feed."""
        task = asyncio.create_task(self.follow(**options))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def connection(self, store: MemoryStore) -> ClusterConnection:
        return ClusterConnection(store=store, manager=self._cluster.new_manager(store), root=ROOT)

    async def table(self) -> ClientTable:
        return await open_client_table(IN_ZOOKEEPER, self.connection(self._cluster.store))


@in_virtual_time
async def test_a_client_goes_on_where_it_was() -> None:
    async with feed(2) as (cluster, [first, second]):
        run = Run(cluster)
        async with run.following():
            await pass_time()
            assert run.handled == []
            await cluster.change(first)
            await pass_time()
            assert run.ledger_ids == [first]

        await cluster.change(second)
        await cluster.delete(first)
        await pass_time()
        later = Run(cluster)
        await later.follow(once=True)

        assert sorted(later.ledger_ids) == [first, second]
        assert {each.ledger_id: each.is_deleted for each in later.handled} == {
            first: True,
            second: False,
        }
        assert all(each.time_ms for each in later.handled)
        assert later.told == [f"Client {NAME}: 2 changed ledgers to handle."]
        again = Run(cluster)
        await again.follow(once=True)
        assert again.handled == []


@in_virtual_time
async def test_a_new_client_that_dies_before_its_first_receipt_misses_nothing() -> None:
    async with feed(1) as (cluster, [ledger_id]):
        async with Run(cluster).following():
            await pass_time()
        await cluster.change(ledger_id)
        await pass_time()

        run = Run(cluster)
        await run.follow(once=True)

        assert run.ledger_ids == [ledger_id]


@in_virtual_time
async def test_from_start_gives_all_ledgers_of_the_log() -> None:
    async with feed(5) as (cluster, ledger_ids):
        run = Run(cluster)
        await run.follow(once=True, from_start=True)

        assert set(ledger_ids) <= set(run.ledger_ids)
        assert len(run.ledger_ids) == len(set(run.ledger_ids))


@in_virtual_time
async def test_a_client_waits_for_a_feed_that_is_not_enabled() -> None:
    cluster = await FeedCluster.start()
    ledger_id = await cluster.create()
    async with cluster.leader():
        run = Run(cluster)
        async with run.following():
            await pass_time()
            assert run.told == [
                "The feed is not enabled. Enable it: bookmender feed enable. Waiting for it."
            ]
            await cluster.enable()
            await pass_time(5)
            await cluster.change(ledger_id)
            await pass_time()

            assert ledger_id in run.ledger_ids


@in_virtual_time
async def test_once_does_not_wait_for_a_feed_that_is_not_enabled() -> None:
    cluster = await FeedCluster.start()

    with pytest.raises(SettingsError, match="bookmender feed enable"):
        await Run(cluster).follow(once=True)


@in_virtual_time
async def test_a_client_of_an_earlier_feed_is_given_all_ledgers_and_told_so() -> None:
    async with feed(2) as (cluster, [kept, deleted]):
        await Run(cluster).follow(once=True, from_start=True)
        await cluster.disable()
        await pass_time()
        await cluster.delete(deleted)
        await cluster.enable()
        await pass_time(5)

        run = Run(cluster)
        await run.follow(once=True)

        assert kept in run.ledger_ids
        assert run.told[0].startswith(f"Client {NAME} had followed an earlier feed.")


@in_virtual_time
async def test_a_running_client_notices_that_the_feed_was_enabled_again() -> None:
    async with feed(1) as (cluster, [kept]):
        run = Run(cluster)
        async with run.following(from_start=True):
            await pass_time()
            run.handled.clear()
            await cluster.disable()
            await pass_time(2 * RETRY_CHECK_S)
            assert run.told[-1] == "The feed was disabled. To go on: bookmender feed enable."
            await cluster.enable()
            await pass_time(10)

            assert kept in run.ledger_ids
            assert "The feed was disabled and enabled again." in run.told


@in_virtual_time
async def test_a_failure_stops_nothing_and_is_tried_again_on_order() -> None:
    async with feed(2) as (cluster, [bad, good]):
        run = Run(cluster, fails={bad})
        async with run.following():
            await pass_time()
            await cluster.change(bad)
            await cluster.change(good)
            await pass_time()
            assert sorted(run.ledger_ids) == sorted([bad, good])
            line, hint = run.told[-2:]
            assert line == f"ledger {bad} failed: disk full"
            assert f"bookmender feed clients {NAME}." in hint
            table = await run.table()
            (summary,) = await table.list()
            assert [each.because for each in summary.failures] == ["disk full"]

            run.handled.clear()
            assert await table.order_retries(NAME) == 1
            await pass_time(2 * RETRY_CHECK_S)
            assert run.ledger_ids == [bad]  # tried once, and failed again
            assert run.told[-2:] == ["1 failed ledger to try again.", line]
            run.fails.clear()
            await table.order_retries(NAME)
            await pass_time(2 * RETRY_CHECK_S)

            assert run.ledger_ids == [bad, bad]
            (summary,) = await table.list()
            assert not summary.failures


@in_virtual_time
async def test_stop_on_failure_leaves_the_change_to_the_next_run() -> None:
    async with feed(1) as (cluster, [ledger_id]):
        async with Run(cluster).following():
            await pass_time()
        await cluster.change(ledger_id)
        await pass_time()

        with pytest.raises(HandlingFailedError, match="disk full"):
            await Run(cluster, fails={ledger_id}).follow(stop_on_failure=True)
        run = Run(cluster)
        await run.follow(once=True)

        assert run.ledger_ids == [ledger_id]


@in_virtual_time
async def test_the_later_process_of_a_name_fences_the_earlier() -> None:
    async with feed(1) as (cluster, [ledger_id]):
        earlier = asyncio.create_task(Run(cluster).follow())
        await pass_time()
        later = Run(cluster)
        async with later.following():
            await pass_time(2 * RETRY_CHECK_S)
            with pytest.raises(ClientFencedError):
                await earlier
            connection = later.connection(cluster.store)
            assert await connected_names(connection) == {NAME}
            await cluster.change(ledger_id)
            await pass_time()
            assert later.ledger_ids == [ledger_id]
        assert await connected_names(connection) == frozenset()


@in_virtual_time
async def test_a_follower_that_opens_again_does_not_fence_a_later_process() -> None:
    """The earlier one loses its session, and a later one begins before it opens another."""
    async with feed(1) as (cluster, [ledger_id]):
        earlier, later = Run(cluster), Run(cluster)
        async with earlier.following():
            await pass_time()
        async with later.following():
            await pass_time()
            with pytest.raises(ClientFencedError):
                await earlier.follow()
            await cluster.change(ledger_id)
            await pass_time()
            assert later.ledger_ids == [ledger_id]


@in_virtual_time
async def test_failures_count_after_the_feed_was_opened_again() -> None:
    async with feed(1) as (cluster, [bad]):
        run = Run(cluster, fails={bad})
        async with run.following(from_start=True):
            await pass_time()
        assert await run.follow(once=True) == 1
        run.fails.clear()
        await (await run.table()).order_retries(NAME)
        assert await run.follow(once=True) == 0


@in_virtual_time
async def test_receipts_of_a_later_feed_are_an_error_not_a_loop() -> None:
    """As with one database and one name for two clusters."""
    async with feed() as (cluster, _):
        await ZooKeeperReceiptStore.open(
            cluster.store, folder=PATHS.feed_clients, client=NAME, generation=1 << 50
        )
        with pytest.raises(SettingsError, match="of another cluster"):
            await Run(cluster).follow()


@in_virtual_time
async def test_failures_that_do_not_fit_into_zookeeper_end_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with feed(3) as (cluster, ids):
        bad = {*ids}
        monkeypatch.setattr(zookeeper_stores, "RECORD_BYTES_MAX", 400)
        with pytest.raises(HandlingFailedError, match="too many failures for ZooKeeper"):
            await Run(cluster, fails=bad).follow(from_start=True)


@in_virtual_time
async def test_a_retry_does_not_replace_a_later_change() -> None:
    follower = Follower(
        cast(RecoveryService, None),
        Run(await FeedCluster.start()).handle,
        FollowOptions(name=NAME),
        tell=print,
        failed=set(),
    )
    later = CommittedVersion(ledger_key(7), 20, None, True)
    await follower.receive(later)
    await follower.receive(CommittedVersion(ledger_key(7), 10, 1, False))

    assert list(follower._waiting.values()) == [later]


@pytest.mark.parametrize(
    ("error", "text"),
    [
        pytest.param(
            ClientFencedError(FENCED),
            f"another process follows the feed as client {NAME} now. Each name has one process: "
            "stop the other one, or give this one another --client name.",
            id="fenced",
        ),
        pytest.param(
            ClientDeletedError(DELETED),
            f"client {NAME} was deleted (bookmender feed clients --forget).",
            id="deleted",
        ),
    ],
)
def test_a_follower_that_may_not_go_on_says_why_and_has_its_own_exit_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: ClientFencedError, text: str
) -> None:
    async def fenced(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(feed_follow, "follow", fenced)
    monkeypatch.setattr(feed_follow, "connection_of", lambda cluster: cluster)
    monkeypatch.setattr(feed_follow, "set_up_logs", lambda settings: None)
    monkeypatch.setattr(feed_follow, "run_with", lambda settings, act: asyncio.run(act(None)))
    config = tmp_path / "bookmender.toml"
    config.write_text('metadata_service_uri = "zk+hierarchical://127.0.0.1:1/ledgers"\n')

    result = CliRunner().invoke(cli, ["feed", "follow", "--client", NAME, "--config", str(config)])

    assert result.exit_code == EXIT_FENCED == 4
    assert text in result.stderr


@in_virtual_time
async def test_a_follower_opens_the_feed_again_when_a_checkpoint_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with feed(3) as (cluster, ids):
        run = Run(cluster)
        async with run.following():
            await pass_time()
            deliver = CheckpointLog._deliver

            async def skip(
                log: CheckpointLog, segment: object, opened: OpenedLedger, _: object
            ) -> None:
                """Deliver nothing, as if the entries were not there."""
                log._next_entry_id = opened.lac + 1

            monkeypatch.setattr(CheckpointLog, "_deliver", skip)
            await cluster.change(ids[0])
            await pass_time()
            monkeypatch.setattr(CheckpointLog, "_deliver", deliver)
            await cluster.change(ids[1])
            await pass_time(2 * RECONNECT_S)
            await cluster.change(ids[2])
            await pass_time()

        assert run.ledger_ids == ids
        assert "does not follow the last one" in run.told[1]
        assert "Next try in 5 s" in run.told[1]


@in_virtual_time
async def test_a_follower_that_cannot_read_the_log_again_waits_for_bookies() -> None:
    async with feed(1) as (cluster, [ledger_id]):
        run = Run(cluster)
        async with run.following():
            await pass_time()
            await cluster.disable()
            cluster.unwritable = set(BOOKIES)
            cluster.bookies.before = unreachable
            await cluster.enable()
            await pass_time(30)
            cluster.unwritable = set()
            cluster.bookies.before = nothing
            await pass_time(120)

        assert ledger_id in run.ledger_ids


async def unreachable(call: Call) -> None:
    raise NoAnswerError("a fault of the test")


@in_virtual_time
async def test_a_client_is_told_that_the_feed_began_again_after_a_loss() -> None:
    async with feed(2) as (cluster, ids):
        run = Run(cluster)
        async with run.following():
            await pass_time()
            await cluster.change(ids[0])
            await pass_time()
            lost = (await cluster.chain()).logs[-1].ledger_id
            await cluster.delete(lost)
            await pass_time(20)

        assert set(ids) <= set(run.ledger_ids), "it is told of all ledgers"
        assert f"its ledger {lost} was lost" in run.told[1]
        assert "begins again" in run.told[2]


@in_virtual_time
async def test_a_forgotten_client_ends_and_its_name_is_new() -> None:
    async with feed() as (cluster, _):
        run = Run(cluster)
        task = asyncio.create_task(run.follow())
        await pass_time()

        table = await run.table()
        assert await table.delete(NAME)
        assert not await table.delete(NAME)
        await pass_time(2 * RETRY_CHECK_S)

        with pytest.raises(ClientFencedError):
            await task
        assert await table.find(NAME) is None


@in_virtual_time
async def test_a_lost_session_ends_the_client_with_that_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = await FeedCluster.start()
    await ensure_znode(cluster.store, f"{ROOT}/available/readonly")
    await ensure_znode(cluster.store, f"{ROOT}/available/a:3181")
    await ensure_znode(cluster.store, f"{ROOT}/cookies")

    @asynccontextmanager
    async def bookies(*_: object, **__: object) -> AsyncIterator[object]:
        yield cluster.bookies

    monkeypatch.setattr(client_module, "open_bookies", bookies)
    async with cluster.leader():
        await cluster.enable()
        await pass_time()
        store = MemoryStore(cluster.tree)
        run = Run(cluster)
        task = asyncio.create_task(
            follow(
                run.connection(store),
                FollowOptions(name=NAME),
                run.handle,
                tell=run.told.append,
                run=run.run,
            )
        )
        await pass_time()

        cluster.tree.expire(store)

        with pytest.raises(SessionLostError):
            await task


# --- Commands and text ----------------------------------------------------------------------------

CHANGE = Change(ledger_id=7, is_deleted=False, version=31, time_ms=1_700_000_000_000)


def test_a_command_gets_the_ledger_in_variables_and_as_json(tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = (
        f'echo "$LEDGER_ID $LEDGER_DELETED $LEDGER_VERSION $LEDGER_TIME_MS" >{out}; cat >>{out}'
    )

    assert asyncio.run(running(command)(CHANGE)) is None

    line, document = out.read_text().splitlines()
    assert line == "7 0 31 1700000000000"
    assert json.loads(document) == msgspec.to_builtins(CHANGE)


def test_the_reason_of_a_failure_is_the_last_line_of_standard_error(
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    handle = running("echo first >&2; echo 'no space left' >&2; echo >&2; exit 3")

    assert asyncio.run(handle(CHANGE)) == "no space left (exit code 3)"
    assert capfdbinary.readouterr().err == b"first\nno space left\n\n"


def test_a_command_that_reads_nothing_and_says_nothing() -> None:
    reason = asyncio.run(running("kill -9 $$")(CHANGE))

    assert reason == "nothing on standard error (signal 9)"


def test_a_process_that_a_command_leaves_running_does_not_stop_the_follower() -> None:
    async def main() -> str | None:
        async with asyncio.timeout(30):
            return await running("sleep 60 & echo $! >&2; exit 3")(CHANGE)

    reason = asyncio.run(main())

    assert reason is not None
    pid, _, how = reason.partition(" ")
    assert how == "(exit code 3)"
    os.kill(int(pid), signal.SIGKILL)  # it is still there


def test_after_ctrl_c_all_processes_of_a_command_are_ended(tmp_path: Path) -> None:
    pids = tmp_path / "pids"

    async def main() -> None:
        handling = asyncio.ensure_future(running(f"sleep 60 & echo $! >{pids}; wait")(CHANGE))
        async with asyncio.timeout(30):
            while True:
                if pids.exists() and pids.read_text().endswith("\n"):
                    break
                await asyncio.sleep(0.01)
        handling.cancel()
        await asyncio.wait({handling})

    asyncio.run(main())

    # The process was ended; its parent, init, may not have removed it yet.
    status = Path("/proc", pids.read_text().strip(), "stat")
    assert not status.exists() or " Z " in status.read_text()


def test_the_end_of_the_reader_ends_the_follower(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = os.pipe()
    with os.fdopen(theirs, "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        os.close(ours)

        with pytest.raises(BrokenPipeError):
            asyncio.run(watch_reader())


@pytest.mark.parametrize(
    ("output", "line"),
    [
        ("text", "2023-11-14T22:13:20.000Z  changed  ledger 7  version 0x1f"),
        (
            "json",
            '{"ledger_id": 7, "is_deleted": false, "version": 31, "time_ms": 1700000000000}',
        ),
    ],
)
def test_a_change_is_one_line(output: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    asyncio.run(printing(output)(CHANGE))

    assert capsys.readouterr().out == f"{line}\n"


@pytest.mark.parametrize(
    ("low_watermark", "lag"),
    [
        pytest.param(30, Lag(checkpoints=0, seconds=0), id="up to date"),
        pytest.param(10, Lag(checkpoints=2, seconds=4), id="the first without receipt counts"),
        pytest.param(15, Lag(checkpoints=2, seconds=4), id="within a checkpoint"),
        pytest.param(
            4, Lag(checkpoints=3, seconds=5, is_more=True, is_lost=True), id="before the log"
        ),
    ],
)
def test_the_lag_of_a_client(low_watermark: int, lag: Lag) -> None:
    found = lag_of(
        low_watermark,
        [(10, 5_000), (20, 6_000), (30, 7_000)],
        oldest_previous_id=5,
        is_complete=low_watermark != 4,
        now_ms=10_000,
    )

    assert found == lag


FOLLOWER = FeedFollower(
    name="c",
    is_connected=True,
    is_current=True,
    low_watermark=1,
    lag_checkpoints=None,
    lag_s=None,
    is_lag_more=False,
    has_lost_changes=False,
    receipt_count=0,
    failure_count=0,
)
FOLLOWERS: dict[str, dict[str, object]] = {
    "no receipt yet": {"low_watermark": None},
    "receipts of an earlier feed": {"is_current": False},
    "up to date": {"lag_checkpoints": 0, "lag_s": 0},
    "behind": {"lag_checkpoints": 2, "lag_s": 90, "is_lag_more": True},
}


def test_a_client_and_a_lift_as_text(said: Said) -> None:
    clients = {
        name: msgspec.structs.replace(FOLLOWER, **changes).to_text()
        for name, changes in FOLLOWERS.items()
    }
    lift = WatermarkLift(from_id=16, to_id=32, because=LiftReason.RETENTION)

    said("feed", {**clients, "changes are lost": lift_text(lift)})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["follow"], "Missing option '--client'"),
        (["follow", "--client", "x", "--stop-on-failure"], "--stop-on-failure needs --exec."),
    ],
)
def test_wrong_use_is_explained(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(cli, ["feed", *arguments])

    assert result.exit_code == 2
    assert message in result.output


def test_the_feed_is_not_disabled_by_mistake() -> None:
    result = CliRunner().invoke(cli, ["feed", "disable"])

    assert result.exit_code == 2
    assert "This deletes the feed, whose clients must then begin again. Give --yes" in result.output


def test_a_line_that_cannot_be_printed_names_standard_output(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(_: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(click, "echo", full)
    change = feed_follow.Change(ledger_id=7, is_deleted=False, version=1, time_ms=None)

    with pytest.raises(OSError, match="No space left on device: 'standard output'"):
        asyncio.run(feed_follow.printing("json")(change))


@pytest.mark.parametrize(
    ("arguments", "exit_code", "text"),
    [
        (["clients"], 1, "Client catalogue: not connected, lag unknown, 1 failure.\n"),
        (["clients", NAME], 1, " ago: disk full\n1 failure. Try again: --retry\n"),
        (["clients", NAME, "--retry"], 0, "1 ledger will be tried again.\n"),
        (["clients", "nobody"], 2, "The store has no client 'nobody'."),
        (["clients", "--retry"], 2, "--retry and --forget need the NAME of a client."),
        (["clients", NAME, "--forget"], 2, "This deletes client catalogue with 1 failure. Give"),
        (["clients", NAME, "--forget", "--dry-run"], 0, "Would delete client catalogue with 1 "),
        (["clients", NAME, "--forget", "--yes"], 0, "Deleted client catalogue with 1 failure.\n"),
        (["clients", "nobody", "--forget", "--yes"], 2, "The store has no client 'nobody'."),
        (["clients", "--store", "mysql://host/feed"], 1, "has the scheme 'mysql'; allowed: zook"),
    ],
)
def test_commands_about_clients(
    in_memory: InMemory, arguments: list[str], exit_code: int, text: str
) -> None:
    result, _ = in_memory(feed_command.feed, *arguments, prepare=client_with_failure)

    assert result.exit_code == exit_code
    assert text in result.output + str(result.exception)


@in_virtual_time
async def test_once_returns_how_many_ledgers_failed() -> None:
    async with feed(2) as (cluster, [bad, _]):
        assert await Run(cluster, fails={bad}).follow(once=True, from_start=True) == 1
        again = Run(cluster)
        assert await again.follow(once=True, from_start=True) == 0
        assert again.told[-1].startswith("It goes on where it was: --from-start is for new clients")


def test_a_feed_is_enabled_and_enabled_again(in_memory: InMemory) -> None:
    async def enabled(cluster: Cluster) -> None:
        await order_change(
            cluster.store,
            PATHS,
            lambda chain: chain.enabled(now_ms=1, by="root@host", retention_s=30 * 86_400),
        )

    new, _ = in_memory(feed_command.enable)
    again, _ = in_memory(feed_command.enable, prepare=enabled)
    changed, _ = in_memory(feed_command.enable, "--retention", "2d", prepare=enabled)

    assert "It keeps changes for 7 d." in new.output
    assert "bookmender feed follow --client NAME --from-start" in new.output
    assert again.output == "The feed is already enabled. It keeps changes for 30 d.\n"
    assert changed.output == "The feed is already enabled. It keeps changes for 2 d.\n"
