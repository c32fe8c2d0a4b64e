"""The output of ``bookmender ledger show``."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from click.testing import CliRunner

from daemon.admin_session import AdminSession
from daemon.cli import ledger as ledger_command
from daemon.operations.identities import give_trust
from daemon.operations.ledgers import CUSTOM_BYTES_MAX
from ledgers.errors import CorruptionError
from ledgers.model import LedgerState
from replication.reasons import Facts
from tests.auditor.scenes import with_ledgers
from tests.daemon.in_memory import Prepare, run_in_memory
from tests.daemon.visits import visiting
from tests.replication.cluster import Cluster
from tests.replication.ledger_values import B1, B2, B3, BOOKIES
from tests.replication.nodes import LEDGER


def test_unreadable_metadata_is_one_line_with_advice(
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


# --- The end, and newer bookies -------------------------------------------------------------------


def shown(
    monkeypatch: pytest.MonkeyPatch, prepare: Prepare, *arguments: str
) -> list[str] | dict[str, Any]:
    """Return the printed lines about the ledger, or the object with ``-o json``."""
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


async def of_a_topic(cluster: Cluster) -> None:
    custom = (("pulsar/managed-ledger", b"public/a/persistent/b\x1b"), ("z", b"\xff" * 1_000))
    await cluster.write_ledger((B1, B2), custom=custom)


def test_custom_metadata_tells_the_topic(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = shown(monkeypatch, of_a_topic)
    record = shown(monkeypatch, of_a_topic, "-o", "json")

    assert r"  pulsar/managed-ledger: public/a/persistent/b\x1b" in lines
    assert isinstance(record, dict)
    assert record["custom"] == {
        "pulsar/managed-ledger": "public/a/persistent/b\x1b",
        "z": "\N{REPLACEMENT CHARACTER}" * CUSTOM_BYTES_MAX,
    }


async def two_reformatted(cluster: Cluster) -> None:
    await cluster.write_ledger(
        (B1, B2, B3), write_quorum=3, ack_quorum=2, state=LedgerState.IN_RECOVERY
    )
    for bookie in (B1, B2):
        await cluster.kill(bookie)
        await cluster.wipe(bookie)
        await cluster.revive(bookie)


async def two_reformatted_and_tried(cluster: Cluster) -> None:
    await two_reformatted(cluster)
    async with cluster.node() as node:
        await node.note_unproven(LEDGER, Facts(errors=("its end cannot be proven",)))


async def tried_and_closed(cluster: Cluster) -> None:
    await cluster.write_ledger((B1, B2, B3))
    async with cluster.node() as node:
        await node.note_unproven(LEDGER, Facts(errors=("its end cannot be proven",)))


async def one_replaced(cluster: Cluster) -> None:
    await cluster.write_ledger((B1, B2, B3), write_quorum=3, ack_quorum=2, state=LedgerState.OPEN)
    await cluster.kill(B3)


def test_bookies_reformatted_after_the_ledger_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = shown(monkeypatch, two_reformatted)

    assert f"  from entry 0: {B1} (reformatted), {B2} (reformatted), {B3}" in lines
    assert (
        "  Reformatted bookies may have lost their copies. To read all of these copies: "
        f"bookmender repair {LEDGER}"
    ) in lines
    record = shown(monkeypatch, two_reformatted, "-o", "json")
    assert isinstance(record, dict)
    assert record["segments"][0]["reformatted"] == [B1, B2]


async def repaired_since(cluster: Cluster) -> None:
    """Create a closed ledger, reformat B2, and write the metadata again.

    A repair that puts B2 back into the ensemble does the same.
    """
    written = await cluster.write_ledger((B1, B2, B3))
    await cluster.kill(B2)
    await cluster.wipe(B2)
    await cluster.revive(B2)
    await cluster.store.set(cluster.manager.path(LEDGER), written.data, version=written.version)


async def reformatted_since(cluster: Cluster) -> None:
    await repaired_since(cluster)
    await cluster.kill(B2)
    await cluster.wipe(B2)
    await cluster.revive(B2)


def test_a_closed_ledger_shows_bookies_newer_than_its_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A repair may have put a reformatted bookie into the ensemble; that one is not shown."""
    assert f"  from entry 0: {B1}, {B2}, {B3}" in shown(monkeypatch, repaired_since)
    assert f"  from entry 0: {B1}, {B2} (reformatted), {B3}" in shown(
        monkeypatch, reformatted_since
    )


@pytest.mark.parametrize(
    ("prepare", "end"),
    [
        pytest.param(
            two_reformatted_and_tried,
            f"its end cannot be proven. `bookmender ledger close {LEDGER} --accept-loss --yes` "
            "closes the ledger after the last entry that is left",
            id="a recovery failed",
        ),
        pytest.param(
            two_reformatted,
            f"its end may not be provable (reformatted after the ledger was created: {B1}, {B2})",
            id="no recovery yet",
        ),
        pytest.param(tried_and_closed, None, id="closed since"),
        pytest.param(one_replaced, None, id="enough registered bookies"),
    ],
)
def test_an_unproven_end_is_shown_with_advice(
    prepare: Prepare, end: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = shown(monkeypatch, prepare)
    record = shown(monkeypatch, prepare, "-o", "json")

    assert [line for line in lines if "its end " in line] == ([f"  {end}"] if end else [])
    assert isinstance(record, dict)
    assert record["end_doubt"] == end


async def two_reformatted_and_trusted(cluster: Cluster) -> None:
    await two_reformatted(cluster)
    await give_trust(visiting(cluster), None)


def test_a_bookie_with_a_trusted_cookie_is_not_shown_as_newer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    record = shown(monkeypatch, two_reformatted_and_trusted, "-o", "json")

    assert isinstance(record, dict)
    assert record["segments"][0]["reformatted"] == []
    assert record["end_doubt"] is None


def test_a_ledger_is_shown_while_all_bookies_are_absent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def outage(cluster: Cluster) -> None:
        await cluster.write_ledger((B1, B2))
        for bookie in BOOKIES:
            await cluster.kill(bookie)

    lines = shown(monkeypatch, outage)

    assert f"  from entry 0: {B1} (absent), {B2} (absent)" in lines
