"""docs/json.md says what the types of the answers say, and the commands print these types."""

import json
import re
from pathlib import Path

import click
import msgspec
import pytest
from click.testing import CliRunner

from daemon.answers_page import ANSWERS
from daemon.cli import bookie, check, feed, history, ledger, orders, plan, queue
from daemon.cli.main import cli
from daemon.cli.status import status
from ledgers.model import LedgerState
from replication import znodes
from replication.ledger_record import GivenUpEntries, record_given_up
from tests.daemon.feeds import client_with_failure
from tests.daemon.in_memory import InMemory, Prepare, nothing
from tests.daemon.visits import order_drain
from tests.replication.cluster import Cluster
from tests.replication.ledger_values import B1, B2, B3, B4
from tests.replication.nodes import LEDGER, PATHS

PAGE = Path(__file__).parents[2] / "docs" / "json.md"


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


Call = tuple[click.Command, tuple[str, ...], Prepare]


def call(command: click.Command, *arguments: str, prepare: Prepare = nothing) -> Call:
    return command, arguments, prepare


PRINTED: dict[str, list[Call]] = {
    "bookmender status": [call(status, prepare=marked_and_locked)],
    "bookmender bookie list": [call(bookie.list_bookies, prepare=draining_b1)],
    "bookmender bookie drain": [call(bookie.drain, prepare=draining_b1)],
    "bookmender bookie maintenance": [call(bookie.maintain, B3, "--for", "1h")],
    "bookmender bookie decommission": [call(bookie.decommission, B4, prepare=absent_b4)],
    "bookmender bookie trust-identities": [call(bookie.trust_identities)],
    "bookmender queue": [call(queue.queue, prepare=marked_and_locked)],
    "bookmender queue --by": [call(queue.queue, "--by", "topic", prepare=marked_and_locked)],
    "bookmender ledger show": [call(ledger.show, str(LEDGER), prepare=given_up)],
    "bookmender plan": [call(plan.plan, prepare=marked_and_locked)],
    "bookmender history": [call(history.history)],
    "bookmender hold": [call(orders.hold, *each) for each in ([], ["--begin"], ["--end"])],
    "bookmender check": [call(check.check)],
    "bookmender check NAME": [call(check.check, "all-ledgers")],
    "bookmender check --pause, --resume": [
        call(check.check, each) for each in ("--pause", "--resume")
    ],
    "bookmender disable, enable": [call(orders.disable), call(orders.enable)],
    "bookmender recovery-delay": [call(orders.recovery_delay)],
    "bookmender feed status": [call(feed.status)],
    "bookmender feed enable, disable": [call(feed.enable), call(feed.disable, "--yes")],
    "bookmender feed clients": [call(feed.clients, prepare=client_with_failure)],
    "bookmender feed clients NAME": [call(feed.clients, "catalogue", prepare=client_with_failure)],
    "bookmender feed clients NAME --forget": [
        call(feed.clients, "catalogue", "--forget", "--dry-run", prepare=client_with_failure)
    ],
}
"""Commands of one session, on a cluster in memory."""


def test_the_page_has_a_heading_once() -> None:
    headings = re.findall("^#+ (.+)$", PAGE.read_text(), re.MULTILINE)

    assert len(headings) == len(set(headings)), "two objects have one name"


@pytest.mark.parametrize("title", PRINTED)
def test_a_command_prints_its_type(title: str, in_memory: InMemory) -> None:
    for command, arguments, prepare in PRINTED[title]:
        result, _ = in_memory(command, *arguments, "-o", "json", prepare=prepare)
        assert result.stdout, result
        msgspec.convert(json.loads(result.stdout), dict(ANSWERS)[title])


def test_a_failed_command_prints_an_error() -> None:
    ran = CliRunner().invoke(cli, ["check", "nonsense", "-o", "json"])

    assert json.loads(ran.stdout).keys() == {"error", "exit_code"}
