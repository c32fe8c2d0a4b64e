"""docs/json.md says what the types of the answers say, and the commands print these types."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest
from click.testing import CliRunner
from msgspec import to_builtins

from auditor.checks.records import CheckRun
from auditor.mark_reasons import PrivateQueue
from checkpoints.model import ledger_key
from checkpoints.receipts import Failure
from checkpoints.stores.zookeeper import ZooKeeperReceiptStore
from daemon.answers import Answer, as_json
from daemon.answers_page import ANSWERS, json_page
from daemon.cli import (
    bookie,
    check,
    config,
    doctor,
    feed,
    history,
    ledger,
    orders,
    queue,
)
from daemon.cli.feed_follow import Change
from daemon.cli.main import cli
from daemon.local.commands import _json as local_json
from daemon.local.spec import ClusterSpec
from daemon.local.status import at_rest
from daemon.operations.bookies import BookieRow, BookieState
from daemon.operations.checks import CheckRow, Checks
from daemon.operations.feed import FeedFollower
from daemon.operations.history import select
from daemon.operations.ledgers import IdleLedger, IdleLedgers
from daemon.operations.observe import outlook
from daemon.operations.plan import RepairPlan, ledger_plan
from daemon.operations.repair import Repaired
from daemon.operations.restore import RecordedWrite, RecordedWrites, answer_of
from ledgers.bookies import DiskSpace
from ledgers.codec.metadata import parse_metadata
from ledgers.model import LedgerState
from ledgers.store import Stat
from replication import znodes
from replication.by_hand import Preview, Restoring
from replication.history import Event, NodeEvent, RecordedHistory
from replication.journal import JournalRecord
from replication.ledger_record import GivenUpEntries, UnprovenEnd, WaitingNote, record_given_up
from replication.orders import DrainOrder, HoldOrder, MaintenanceWindow
from replication.plan import Plan
from replication.reasons import Blocked, Facts, Reason
from tests.daemon.in_memory import Prepare, run_in_memory
from tests.daemon.test_close_command import OPEN
from tests.daemon.test_observe import LOST, SEEN_LOSS
from tests.daemon.test_plan_command import MOVE
from tests.daemon.test_restore_command import AFTER, BEFORE
from tests.daemon.visits import order_drain
from tests.replication.cluster import Cluster
from tests.replication.ledger_values import B1, B2, B3, B4
from tests.replication.nodes import LEDGER, PATHS

PAGE = Path(__file__).parents[2] / "docs" / "json.md"
WINDOW = MaintenanceWindow(since_ms=0, until_ms=1, reason="new disk")
HOLD = HoldOrder(since_ms=0, until_ms=1, bookies=(B1,), reason="a switch")
RUN = CheckRun(started_ms=0, ledger_count=1, active_ms=1, counts={"marked": 1})
WITHOUT_COPY = Blocked(reason=Reason.NO_COPY, facts=Facts(absent=(B1,)), until_ms=1)
BLOCKED = Blocked(reason=Reason.NO_COPY, facts=Facts(absent=(B1,)), besides=(WITHOUT_COPY,))
NOTE = WaitingNote(ledger_id=LEDGER, blocked=BLOCKED, node="host-a", since_ms=0)
PREVIEW = Preview(ledger_id=LEDGER, plan=Plan(repairs=(MOVE,), blocked=(BLOCKED,)))


# --- What the commands print ----------------------------------------------------------------------


async def nothing(cluster: Cluster) -> None:
    pass


async def window_of_b1(cluster: Cluster) -> None:
    await cluster.write_ledger((B1, B2))
    await cluster.kill(B1)


async def draining_b1(cluster: Cluster) -> None:
    await order_drain(cluster, B1)


async def absent_b4(cluster: Cluster) -> None:
    await cluster.kill(B4)
    await cluster.store.create(PATHS.recovery_delay, b"0", with_parents=True)


async def marked_and_locked(cluster: Cluster) -> None:
    await cluster.write_ledger((B1, B2, B3))
    await cluster.mark(B1)
    await cluster.store.create(
        PATHS.lock(LEDGER), znodes.lock_to_bytes("host-a"), is_ephemeral=True
    )


async def given_up(cluster: Cluster) -> None:
    await cluster.write_ledger((B1, B2, B3), state=LedgerState.CLOSED)
    entries = GivenUpEntries(first_entry_id=1, last_entry_id=2, replies="", by="me@here", at_ms=0)
    await record_given_up(cluster.store, PATHS, LEDGER, entries, guards=())


async def feed_client(cluster: Cluster) -> None:
    """Prepare a client of the feed with a failure."""
    receipts = await ZooKeeperReceiptStore.open(
        cluster.store, folder=PATHS.feed_clients, client="catalogue"
    )
    await receipts.store_low_watermark(1)
    await receipts.store_failure(
        Failure(key=ledger_key(LEDGER), version=2, because="disk full", time_ms=0)
    )


def ran(
    module: Any, command: click.Command, *arguments: str, prepare: Prepare = nothing
) -> Callable[[pytest.MonkeyPatch], Any]:
    """Run the command on a cluster in memory, and return its JSON."""

    def run_it(monkeypatch: pytest.MonkeyPatch) -> Any:
        result, _ = run_in_memory(
            monkeypatch, module, command, *arguments, "-o", "json", prepare=prepare
        )
        assert result.stdout, result
        return json.loads(result.stdout)

    return run_it


def value(record: Any) -> Callable[[pytest.MonkeyPatch], Any]:
    return lambda monkeypatch: record


def answer(found: Answer) -> Callable[[pytest.MonkeyPatch], Any]:
    return value(json.loads(as_json(found)))


def settings(command: str, *variables: str) -> Callable[[pytest.MonkeyPatch], Any]:
    """Run a command about settings with these environment variables, and return its JSON."""

    def run_it(monkeypatch: pytest.MonkeyPatch) -> Any:
        for variable in ("BOOKMENDER_METADATA_SERVICE_URI=zk://zk:2181/ledgers", *variables):
            monkeypatch.setenv(*variable.split("=", 1))
        return json.loads(CliRunner().invoke(config.config, [command, "-o", "json"]).stdout)

    return run_it


ROW = BookieRow(
    bookie=B1,
    state=BookieState.ABSENT,
    has_cookie=True,
    drain=DrainOrder(since_ms=0),
    maintenance=WINDOW,
    disk_space=DiskSpace(free_bytes=1, total_bytes=2),
)
RESTORING = Restoring(
    record=JournalRecord(time_ms=0, ledger_id=LEDGER, before=BEFORE, after=AFTER),
    was=parse_metadata(BEFORE),
    present=AFTER,
    now=parse_metadata(AFTER),
    stat=Stat(version=1),
)
SPEC = ClusterSpec(zookeeper_port=2181, bookie_ports=(3181,))
CHECK_ROW = CheckRow(name="all-ledgers", about="reads", interval_s=0, running=RUN, last=RUN)
SEEN = outlook(
    replace(SEEN_LOSS, affected=(LOST,), hold=HOLD, private=PrivateQueue(damaged=(4,))),
    RepairPlan.of([ledger_plan(PREVIEW)]),
)
EVENTS = select(
    RecordedHistory(events=(NodeEvent(node="n", event=Event(kind="order")),)), since_ms=0, limit=9
)
REPAIRED = Repaired.of(
    1,
    waiting=(NOTE,),
    unproven=(UnprovenEnd(ledger_id=LEDGER, facts=Facts(), tried_ms=0),),
    failed={1: "no such ledger"},
)
FEED_CHANGE = Change(ledger_id=LEDGER, is_deleted=False, version=1, time_ms=0)
FEED_CLIENT = FeedFollower(
    name="catalogue",
    is_connected=True,
    is_current=True,
    low_watermark=None,
    lag_checkpoints=None,
    lag_s=None,
    is_lag_more=False,
    has_lost_changes=False,
    receipt_count=0,
    failure_count=0,
)
IDLE = IdleLedger(ledger_id=LEDGER, state="OPEN", idle_s=1, last_entry_id=9, bookies=[B1])

PRINTED: dict[str, list[Callable[[pytest.MonkeyPatch], Any]]] = {
    "bookmender bookie list": [
        ran(bookie, bookie.list_bookies),
        value({"bookies": [ROW.to_json()], "unreadable_orders": []}),
    ],
    "bookmender bookie drain": [ran(bookie, bookie.drain, prepare=draining_b1)],
    "bookmender bookie maintenance": [
        ran(bookie, bookie.maintain, B3, "--for", "1h"),
        ran(bookie, bookie.maintain, B2, "--for", "1h", prepare=window_of_b1),
    ],
    "bookmender bookie decommission": [ran(bookie, bookie.decommission, B4, prepare=absent_b4)],
    "bookmender bookie trust-identities": [ran(bookie, bookie.trust_identities)],
    "bookmender queue list": [ran(queue, queue.list_queue, prepare=marked_and_locked)],
    "bookmender plan": [answer(RepairPlan.of([ledger_plan(PREVIEW)]))],
    "bookmender repair": [answer(REPAIRED)],
    "bookmender ledger show": [ran(ledger, ledger.show, str(LEDGER), prepare=given_up)],
    "bookmender ledger idle": [
        answer(IdleLedgers(ledgers=[IDLE], checked_ms=0, unreadable_records=[]))
    ],
    "bookmender ledger close": [answer(OPEN)],
    "bookmender ledger restore": [
        answer(
            RecordedWrites(
                ledger_id=LEDGER,
                writes=[RecordedWrite(time_ms=0, cluster=None, before=[], after=[])],
            )
        ),
        answer(answer_of(RESTORING, "done")),
    ],
    "bookmender history": [ran(history, history.history)],
    "bookmender hold show, begin, end": [
        ran(orders, each) for each in (orders.show, orders.begin, orders.end)
    ],
    "bookmender check list": [
        ran(check, check.list_checks),
        value(
            to_builtins(
                Checks(rows=(CHECK_ROW,), leader=None, is_paused=False, concerns=()).record()
            )
        ),
    ],
    "bookmender check run": [ran(check, check.run_check, "all-ledgers")],
    "bookmender check pause": [ran(check, check.pause)],
    "bookmender check resume": [ran(check, check.resume)],
    "bookmender limits": [ran(orders, orders.limits)],
    "bookmender disable, enable": [ran(orders, orders.disable), ran(orders, orders.enable)],
    "bookmender recovery-delay": [ran(orders, orders.recovery_delay)],
    "bookmender feed status": [ran(feed, feed.status)],
    "bookmender feed enable": [ran(feed, feed.enable)],
    "bookmender feed disable": [ran(feed, feed.disable, "--yes")],
    "bookmender feed follow": [value(msgspec.to_builtins(FEED_CHANGE))],
    "bookmender feed clients": [
        ran(feed, feed.clients, prepare=feed_client),
    ],
    "bookmender feed clients NAME": [ran(feed, feed.clients, "catalogue", prepare=feed_client)],
    "bookmender feed clients NAME --forget": [
        ran(feed, feed.clients, "catalogue", "--forget", "--dry-run", prepare=feed_client)
    ],
    "bookmender doctor": [value(doctor.to_json([doctor.latency_finding(0.5)]))],
    "bookmender config show": [settings("show")],
    "bookmender config check": [settings("check", "BOOKMENDER_HOLD_SHARE=1")],
    "bookmender local status": [value(json.loads(local_json(at_rest(SPEC, data="/data"))))],
    "bookmender local up": [value(json.loads(local_json(at_rest(SPEC, data="/data"))))],
}
"""From a cluster in memory, or, where one run does not yield every key, from sample values. Those
of commands that docs/json.md describes by hand are not compared."""


def test_the_page_is_what_the_types_say() -> None:
    committed = PAGE.read_text()

    assert committed == json_page(committed), "python -m daemon.answers_page docs/json.md"
    headings = re.findall("^#+ (.+)$", committed, re.MULTILINE)
    assert len(headings) == len(set(headings)), "two objects have one name"


COMMANDS = [(title, answer) for title, answer in ANSWERS if not title.startswith("/")]


@pytest.mark.parametrize(("title", "answer"), COMMANDS, ids=str)
def test_a_command_prints_its_type(
    title: str, answer: type[msgspec.Struct], monkeypatch: pytest.MonkeyPatch
) -> None:
    for sample in PRINTED[title]:
        msgspec.convert(sample(monkeypatch), answer)


def test_a_failed_command_prints_an_error() -> None:
    ran = CliRunner().invoke(cli, ["check", "run", "nonsense", "-o", "json"])

    assert json.loads(ran.stdout).keys() == {"error", "exit_code"}
