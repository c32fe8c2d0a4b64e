"""What ``bookmender ledger show`` says of a ledger."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from click.testing import CliRunner

from daemon.admin_session import AdminSession
from daemon.cli import ledger as ledger_command
from daemon.cli.identities import give_trust
from ledgers.errors import CorruptionError
from ledgers.model import LedgerState
from replication.reasons import Facts
from tests.auditor.scenes import with_ledgers
from tests.daemon.in_memory import Prepare, run_in_memory
from tests.daemon.visits import visiting
from tests.replication.cluster import Cluster
from tests.replication.ledger_values import B1, B2, B3, BOOKIES
from tests.replication.nodes import LEDGER


def test_metadata_that_cannot_be_read_is_one_line_with_what_to_do_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def on_nonsense(action: Callable[[AdminSession], Awaitable[object]]) -> object:
        cluster = await with_ledgers((B1, B2))
        await cluster.store.set(cluster.manager.path(0), b"nonsense", version=-1)
        return await action(visiting(cluster))

    monkeypatch.setattr(
        ledger_command, "run_in_session", lambda config, action: asyncio.run(on_nonsense(action))
    )

    error = CliRunner().invoke(ledger_command.ledger, ["show", "0"]).exception

    assert isinstance(error, CorruptionError)
    assert str(error) == (
        "its metadata cannot be read: ledger metadata does not begin with its version "
        "(data=b'nonsense') (ledger_id=0); `bookmender ledger restore 0` lists earlier metadata, "
        "if it was written on this host"
    )


# --- Its end, and who of its bookies is younger -----------------------------------------------------


def shown(
    monkeypatch: pytest.MonkeyPatch, prepare: Prepare, *arguments: str
) -> list[str] | dict[str, Any]:
    """The lines that it prints of the ledger, or with ``-o json`` the object."""
    result, _ = run_in_memory(
        monkeypatch,
        ledger_command,
        ledger_command.ledger,
        "show",
        str(LEDGER),
        *arguments,
        prepare=prepare,
    )
    assert result.exit_code == 0, result.output
    return json.loads(result.output) if arguments else result.output.splitlines()


async def two_wiped(cluster: Cluster) -> None:
    await cluster.write_ledger(
        (B1, B2, B3), write_quorum=3, ack_quorum=2, state=LedgerState.IN_RECOVERY
    )
    for bookie in (B1, B2):
        await cluster.kill(bookie)
        await cluster.wipe(bookie)
        await cluster.revive(bookie)


async def two_wiped_and_tried(cluster: Cluster) -> None:
    await two_wiped(cluster)
    async with cluster.node() as node:
        await node.ends.note(LEDGER, Facts(errors=("its end cannot be proven",)))


async def tried_and_closed(cluster: Cluster) -> None:
    await cluster.write_ledger((B1, B2, B3))
    async with cluster.node() as node:
        await node.ends.note(LEDGER, Facts(errors=("its end cannot be proven",)))


async def one_replaced(cluster: Cluster) -> None:
    await cluster.write_ledger((B1, B2, B3), write_quorum=3, ack_quorum=2, state=LedgerState.OPEN)
    await cluster.kill(B3)


def test_a_bookie_that_was_set_up_after_the_ledger_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = shown(monkeypatch, two_wiped)

    assert f"  from entry 0: {B1} (set up later), {B2} (set up later), {B3}" in lines
    assert (
        "  set up later than this: what they had of it before is gone, unless it was copied again: "
        f"bookmender repair {LEDGER} reads all that they have of it"
    ) in lines
    record = shown(monkeypatch, two_wiped, "-o", "json")
    assert isinstance(record, dict)
    assert record["segments"][0]["set_up_later"] == [B1, B2]


async def repaired_since(cluster: Cluster) -> None:
    """Closed; B2 was set up anew, and the metadata written after that, as by a repair that put it
    in."""
    written = await cluster.write_ledger((B1, B2, B3))
    await cluster.kill(B2)
    await cluster.wipe(B2)
    await cluster.revive(B2)
    await cluster.store.set(cluster.manager.path(LEDGER), written.data, version=written.version)


async def wiped_since(cluster: Cluster) -> None:
    await repaired_since(cluster)
    await cluster.kill(B2)
    await cluster.wipe(B2)
    await cluster.revive(B2)


def test_of_a_closed_ledger_only_who_was_set_up_after_its_last_change_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert f"  from entry 0: {B1}, {B2}, {B3}" in shown(monkeypatch, repaired_since)
    assert f"  from entry 0: {B1}, {B2} (set up later), {B3}" in shown(monkeypatch, wiped_since)


@pytest.mark.parametrize(
    ("prepare", "end"),
    [
        pytest.param(
            two_wiped_and_tried,
            f"its end cannot be proven. `bookmender ledger close {LEDGER} --accept-loss --yes` closes the ledger after "
            "the last entry that is left",
            id="it was tried",
        ),
        pytest.param(
            two_wiped,
            f"its end may not be provable (reformatted after the ledger was created: {B1}, {B2})",
            id="nobody has tried yet",
        ),
        pytest.param(tried_and_closed, None, id="it was closed since"),
        pytest.param(one_replaced, None, id="those that are there suffice"),
    ],
)
def test_that_an_end_cannot_be_proven_is_told_with_the_next_step(
    prepare: Prepare, end: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = shown(monkeypatch, prepare)
    record = shown(monkeypatch, prepare, "-o", "json")

    assert [line for line in lines if "its end " in line][1:] == ([f"  {end}"] if end else [])
    assert isinstance(record, dict)
    assert record["end_doubt"] == end


async def two_wiped_and_trusted(cluster: Cluster) -> None:
    await two_wiped(cluster)
    await give_trust(visiting(cluster), None)


def test_a_bookie_whose_cookie_is_trusted_is_not_shown_as_set_up_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    record = shown(monkeypatch, two_wiped_and_trusted, "-o", "json")

    assert isinstance(record, dict)
    assert record["segments"][0]["set_up_later"] == []
    assert record["end_doubt"] is None


def test_in_an_outage_of_all_bookies_it_is_shown_and_they_are_absent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def outage(cluster: Cluster) -> None:
        await cluster.write_ledger((B1, B2))
        for bookie in BOOKIES:
            await cluster.kill(bookie)

    lines = shown(monkeypatch, outage)

    assert f"  from entry 0: {B1} (absent), {B2} (absent)" in lines
