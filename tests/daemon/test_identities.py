"""Bookies with new cookies that were not reformatted: an operator trusts them."""

import asyncio
import json

import pytest

from auditor.fsck.options import Level
from auditor.fsck.verdicts import Finding
from auditor.underreplication import reformatted_bookies
from daemon.cli.bookie import trust_identities
from daemon.messages import message
from daemon.operations.identities import give_trust, withdraw_trust
from ledgers.model import LedgerState
from ledgers.store import Stat
from replication.orders import OrderStore
from replication.reasons import Reason
from replication.repair import Outcome
from tests.auditor.auditing import auditing
from tests.daemon.in_memory import InMemory
from tests.daemon.visits import visiting
from tests.fsck.inspections import inspect_twice
from tests.replication.cluster import Cluster, in_virtual_time
from tests.replication.ledger_values import B1, B2, B3, B4, BOOKIES
from tests.replication.nodes import PATHS, ROOT, working
from tests.replication.repairs import blocked_by, open_ledger

LONG_S, SOON_S = 7_200, 60


async def import_cookies(cluster: Cluster) -> None:
    """Create the cookies again, like a tool that imports znodes in another order."""
    for bookie in BOOKIES:
        await cluster.store.delete(f"{ROOT}/cookies/{bookie}")
        await cluster.store.create(f"{ROOT}/cookies/{bookie}")


async def recovered(cluster: Cluster) -> Outcome:
    """Return the outcome for the open ledger after its writer's grace."""
    async with cluster.node() as node:
        lease = await node.lease()
        first = await node.repairer.repair(lease)
        return await node.repairer.repair(lease, first.sighting)


# --- Recovery -------------------------------------------------------------------------------------


@in_virtual_time
async def test_without_trust_the_reason_names_the_command() -> None:
    cluster = await open_ledger()
    await import_cookies(cluster)
    await cluster.kill(B2)

    outcome = await recovered(cluster)

    assert outcome.reason is Reason.END_UNPROVEN
    blocked = blocked_by(outcome)
    assert blocked.facts.are_all_reformatted
    assert "bookmender bookie trust-identities" in message(0, blocked).advice


@in_virtual_time
async def test_with_trust_an_open_ledger_is_closed_and_repaired() -> None:
    cluster = await open_ledger()
    await import_cookies(cluster)
    await give_trust(visiting(cluster), None)
    await cluster.kill(B2)

    await recovered(cluster)

    assert (await cluster.metadata()).last_entry_id == 9
    await cluster.assert_whole()


@in_virtual_time
async def test_a_blocked_ledger_is_tried_as_soon_as_trust_is_given() -> None:
    cluster = await open_ledger()
    await import_cookies(cluster)
    await cluster.kill(B2)
    async with cluster.node() as node, working(node):
        await asyncio.sleep(LONG_S)
        assert not (await cluster.metadata()).is_closed

        await give_trust(visiting(cluster), None)
        await asyncio.sleep(SOON_S)

        assert (await cluster.metadata()).is_closed


@in_virtual_time
async def test_some_reformatted_bookies_are_not_an_import() -> None:
    cluster = await open_ledger()
    for bookie in (B1, B2):
        await cluster.kill(bookie)
        await cluster.wipe(bookie)
        await cluster.revive(bookie)

    outcome = await recovered(cluster)

    assert outcome.reason is Reason.END_UNPROVEN
    assert not blocked_by(outcome).facts.are_all_reformatted


# --- The view, the leader and fsck ----------------------------------------------------------------


@in_virtual_time
async def test_a_bookie_reformatted_after_the_order_is_not_trusted() -> None:
    cluster = await Cluster.start()
    found = await cluster.write_ledger((B1, B2, B3))
    await import_cookies(cluster)
    await give_trust(visiting(cluster), None)
    await cluster.kill(B3)
    await cluster.wipe(B3)
    await cluster.revive(B3)

    async with cluster.node() as node:
        assert node.views.current.initialised_after(found.stat.czxid) == {B3}


@in_virtual_time
async def test_the_leader_marks_nothing_for_trusted_bookies() -> None:
    cluster = await Cluster.start()
    await cluster.write_ledger((B1, B2, B3))
    async with auditing(cluster):
        await asyncio.sleep(60)  # until the present cookies are recorded
    await import_cookies(cluster)
    await give_trust(visiting(cluster), None)

    async with auditing(cluster):
        await asyncio.sleep(120)

    assert await cluster.marked() == []


def test_a_trusted_cookie_does_not_make_a_bookie_reformatted() -> None:
    cookies = {B1: Stat(version=0, czxid=50), B2: Stat(version=0, czxid=60)}

    found = reformatted_bookies(cookies, {B1: 10, B2: 20}, trusted={B1: 50, B2: 55})

    assert set(found) == {B2}


@pytest.mark.parametrize("is_trusted", [False, True])
@in_virtual_time
async def test_fsck_trusts_the_bookies_of_the_order(is_trusted: bool) -> None:
    cluster = await Cluster.start()
    await cluster.write_ledger((B1, B2, B3), write_quorum=3, ack_quorum=2, state=LedgerState.OPEN)
    await import_cookies(cluster)
    if is_trusted:
        await give_trust(visiting(cluster), None)

    verdict = await inspect_twice(cluster, Level.FULL)

    assert verdict is not None
    has_doubt = any(each.finding is Finding.END_UNPROVEN for each in verdict.evidence)
    assert has_doubt is not is_trusted


# --- The command ----------------------------------------------------------------------------------


@in_virtual_time
async def test_trust_is_extended_and_withdrawn() -> None:
    cluster = await Cluster.start()
    seen = visiting(cluster)
    await give_trust(seen, [B1])

    await give_trust(seen, [B2])
    assert set((await OrderStore(cluster.store, PATHS).read()).trusted_cookies) == {B1, B2}

    await withdraw_trust(seen)
    assert (await OrderStore(cluster.store, PATHS).read()).trusted_cookies == {}


@pytest.mark.parametrize(
    ("arguments", "exit_code", "told"),
    [
        pytest.param((), 0, "by the age of its cookie", id="shown"),
        pytest.param(("--all",), 1, "To do it, give --yes", id="all, but not --yes"),
        pytest.param(("--all", "--yes"), 0, f"{B4}: trusted", id="all"),
        pytest.param((B1, "--yes"), 0, "1 trusted bookie", id="one"),
        pytest.param(("--yes",), 2, "Name bookies", id="none"),
        pytest.param(("--withdraw", "--all"), 2, "Do not name bookies", id="withdrawn for some"),
        pytest.param(("--withdraw", "--yes"), 0, "0 trusted", id="withdrawn"),
    ],
)
def test_the_command_shows_gives_and_withdraws_trust(
    in_memory: InMemory, arguments: tuple[str, ...], exit_code: int, told: str
) -> None:
    result, _ = in_memory(trust_identities, *arguments)

    assert result.exit_code == exit_code, result.output
    assert told in result.output


def test_the_json_has_every_bookie(in_memory: InMemory) -> None:
    record = json.loads(in_memory(trust_identities, "--all", "--yes", "-o", "json")[0].stdout)

    assert record["has_changed"]
    assert record["bookies"].keys() == {*BOOKIES}
    assert all(each["is_trusted"] for each in record["bookies"].values())
