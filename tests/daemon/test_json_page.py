"""docs/json.md says what the types of the answers say, and the commands print these types."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest
from click.testing import CliRunner

from checkpoints.model import ledger_key
from checkpoints.receipts import Failure
from checkpoints.stores.zookeeper import ZooKeeperReceiptStore
from daemon.answers_page import ANSWERS
from daemon.cli import bookie, check, feed, history, ledger, orders, plan, queue
from daemon.cli.main import cli
from daemon.status import command
from ledgers.model import LedgerState
from replication import znodes
from replication.ledger_record import GivenUpEntries, record_given_up
from tests.daemon.in_memory import Prepare, run_in_memory
from tests.daemon.visits import order_drain
from tests.replication.cluster import Cluster
from tests.replication.ledger_values import B1, B2, B3, B4
from tests.replication.nodes import LEDGER, PATHS

PAGE = Path(__file__).parents[2] / "docs" / "json.md"


async def nothing(cluster: Cluster) -> None:
    pass


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


PRINTED: dict[str, list[Callable[[pytest.MonkeyPatch], Any]]] = {
    "bookmender status": [ran(command, command.status, prepare=marked_and_locked)],
    "bookmender bookie list": [ran(bookie, bookie.list_bookies, prepare=draining_b1)],
    "bookmender bookie drain": [ran(bookie, bookie.drain, prepare=draining_b1)],
    "bookmender bookie maintenance": [ran(bookie, bookie.maintain, B3, "--for", "1h")],
    "bookmender bookie decommission": [ran(bookie, bookie.decommission, B4, prepare=absent_b4)],
    "bookmender bookie trust-identities": [ran(bookie, bookie.trust_identities)],
    "bookmender queue": [ran(queue, queue.queue, prepare=marked_and_locked)],
    "bookmender ledger show": [ran(ledger, ledger.show, str(LEDGER), prepare=given_up)],
    "bookmender plan": [ran(plan, plan.plan, prepare=marked_and_locked)],
    "bookmender history": [ran(history, history.history)],
    "bookmender hold": [ran(orders, orders.hold, *each) for each in ([], ["--begin"], ["--end"])],
    "bookmender check": [ran(check, check.check)],
    "bookmender check NAME": [ran(check, check.check, "all-ledgers")],
    "bookmender check --pause, --resume": [
        ran(check, check.check, each) for each in ("--pause", "--resume")
    ],
    "bookmender disable, enable": [ran(orders, orders.disable), ran(orders, orders.enable)],
    "bookmender recovery-delay": [ran(orders, orders.recovery_delay)],
    "bookmender feed status": [ran(feed, feed.status)],
    "bookmender feed enable, disable": [ran(feed, feed.enable), ran(feed, feed.disable, "--yes")],
    "bookmender feed clients": [ran(feed, feed.clients, prepare=feed_client)],
    "bookmender feed clients NAME": [ran(feed, feed.clients, "catalogue", prepare=feed_client)],
    "bookmender feed clients NAME --forget": [
        ran(feed, feed.clients, "catalogue", "--forget", "--dry-run", prepare=feed_client)
    ],
}
"""Commands of one session, on a cluster in memory."""


def test_the_page_has_a_heading_once() -> None:
    headings = re.findall("^#+ (.+)$", PAGE.read_text(), re.MULTILINE)

    assert len(headings) == len(set(headings)), "two objects have one name"


@pytest.mark.parametrize("title", PRINTED)
def test_a_command_prints_its_type(title: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for sample in PRINTED[title]:
        msgspec.convert(sample(monkeypatch), dict(ANSWERS)[title])


def test_a_failed_command_prints_an_error() -> None:
    ran = CliRunner().invoke(cli, ["check", "nonsense", "-o", "json"])

    assert json.loads(ran.stdout).keys() == {"error", "exit_code"}
