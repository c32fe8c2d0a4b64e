"""The output of ``bookmender ledger show``."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from daemon.cli.ledger import ledger
from daemon.operations.identities import give_trust
from daemon.operations.ledgers import CUSTOM_BYTES_MAX
from ledgers.errors import CorruptionError
from ledgers.model import LedgerState
from replication.reasons import Facts
from tests.daemon.in_memory import InMemory, Prepare
from tests.daemon.visits import visiting
from tests.replication.cluster import Cluster
from tests.replication.ledger_values import B1, B2, B3, BOOKIES
from tests.replication.nodes import LEDGER


def test_unreadable_metadata_is_one_line_with_advice(in_memory: InMemory) -> None:
    async def nonsense(cluster: Cluster) -> None:
        await cluster.write_ledger((B1, B2), ledger_id=0)
        await cluster.store.set(cluster.manager.path(0), b"nonsense", version=-1)

    result, _ = in_memory(ledger, "show", "0", prepare=nonsense)

    assert isinstance(result.exception, CorruptionError)
    assert "(data=b'nonsense') (ledger_id=0)" in str(result.exception)
    assert "`bookmender ledger restore 0` lists earlier metadata" in str(result.exception)


# --- The end, and newer bookies -------------------------------------------------------------------

Shown = Callable[[Prepare], tuple[list[str], dict[str, Any]]]


@pytest.fixture
def shown(in_memory: InMemory) -> Shown:
    """Return a function that shows the ledger, as lines and as an object."""

    def show(prepare: Prepare) -> tuple[list[str], dict[str, Any]]:
        text, _ = in_memory(ledger, "show", str(LEDGER), prepare=prepare)
        record, _ = in_memory(ledger, "show", str(LEDGER), "-o", "json", prepare=prepare)
        assert text.exit_code == record.exit_code == 0, text.output
        return text.output.splitlines(), json.loads(record.output)

    return show


async def of_a_topic(cluster: Cluster) -> None:
    custom = (("pulsar/managed-ledger", b"public/a/persistent/b\x1b"), ("z", b"\xff" * 1_000))
    await cluster.write_ledger((B1, B2), custom=custom)


def test_custom_metadata_tells_the_topic(shown: Shown) -> None:
    lines, record = shown(of_a_topic)

    assert r"  pulsar/managed-ledger: public/a/persistent/b\x1b" in lines
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


def test_bookies_reformatted_after_the_ledger_are_shown(shown: Shown) -> None:
    lines, record = shown(two_reformatted)

    assert f"  from entry 0: {B1} (reformatted), {B2} (reformatted), {B3}" in lines
    assert any(f"bookmender repair {LEDGER}" in line for line in lines)
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


def test_a_closed_ledger_shows_bookies_newer_than_its_change(shown: Shown) -> None:
    """A repair may have put a reformatted bookie into the ensemble; that one is not shown."""
    assert f"  from entry 0: {B1}, {B2}, {B3}" in shown(repaired_since)[0]
    assert f"  from entry 0: {B1}, {B2} (reformatted), {B3}" in shown(reformatted_since)[0]


@pytest.mark.parametrize(
    ("prepare", "facts"),
    [
        pytest.param(
            two_reformatted_and_tried,
            ("cannot be proven", f"bookmender ledger close {LEDGER} --accept-loss --yes"),
            id="a recovery failed",
        ),
        pytest.param(two_reformatted, ("may not be provable", f"{B1}, {B2}"), id="no recovery yet"),
        pytest.param(tried_and_closed, (), id="closed since"),
        pytest.param(one_replaced, (), id="enough registered bookies"),
    ],
)
def test_an_unproven_end_is_shown_with_advice(
    prepare: Prepare, facts: tuple[str, ...], shown: Shown
) -> None:
    lines, record = shown(prepare)

    doubt = record["end_doubt"]
    assert [line for line in lines if "its end " in line] == ([f"  {doubt}"] if facts else [])
    assert all(fact in doubt for fact in facts)
    assert bool(doubt) is bool(facts)


async def two_reformatted_and_trusted(cluster: Cluster) -> None:
    await two_reformatted(cluster)
    await give_trust(visiting(cluster), None)


def test_a_bookie_with_a_trusted_cookie_is_not_shown_as_newer(shown: Shown) -> None:
    _, record = shown(two_reformatted_and_trusted)

    assert (record["segments"][0]["reformatted"], record["end_doubt"]) == ([], None)


def test_a_ledger_is_shown_while_all_bookies_are_absent(shown: Shown) -> None:
    async def outage(cluster: Cluster) -> None:
        await cluster.write_ledger((B1, B2))
        await cluster.kill(*BOOKIES)

    assert f"  from entry 0: {B1} (absent), {B2} (absent)" in shown(outage)[0]
