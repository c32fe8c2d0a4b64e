"""Ledgers that Pulsar isolates: their copies stay in their groups of bookies."""

import asyncio
import json
import random
from collections.abc import AsyncGenerator, Mapping

import pytest
from structlog.testing import capture_logs

from ledgers.errors import UnauthorizedError
from ledgers.model import BookieId, LedgerMetadata, LedgerState, Segment
from ledgers.placement import RandomPlacement
from ledgers.placement.pulsar import CONFIG_KEY, PULSAR_RACKS_PATH, Isolation, isolation_of
from ledgers.registration import Registration
from replication.cluster import IsolationGroups, ViewSource, bookies_within
from replication.reasons import Exclusion, Reason
from replication.repair import OutcomeKind
from replication.targets import TargetSelector
from tests.replication.cluster import Cluster
from tests.replication.ledger_values import B1, B2, B3, B4, B5, B6, B7
from tests.replication.nodes import LEDGER, ROOT
from tests.replication.repairs import blocked_by

POLICY = "org.apache.pulsar.bookie.rackawareness.IsolatedBookieEnsemblePlacementPolicy"
B8 = BookieId("b8:3181")
GROUPS = {"a": (B1, B2, B3, B4), "b": (B5,), "c": (B6, B7)}


def config(policy: str = POLICY, **properties: object) -> tuple[tuple[str, bytes], ...]:
    return ((CONFIG_KEY, json.dumps({"policyClass": policy, "properties": properties}).encode()),)


PRIMARY_A = config(isolationBookieGroups="a")
A_THEN_B = config(isolationBookieGroups="a", secondaryIsolationBookieGroups="b")


def metadata(custom: tuple[tuple[str, bytes], ...]) -> LedgerMetadata:
    return LedgerMetadata(
        ensemble_size=3,
        write_quorum=3,
        ack_quorum=2,
        custom=custom,
        segments=(Segment(first_entry_id=0, ensemble=(B1, B2, B3)),),
    )


# --- The metadata ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("custom", "isolation"),
    [
        pytest.param((), None, id="none"),
        pytest.param(PRIMARY_A, Isolation(frozenset("a")), id="primary"),
        pytest.param(
            config(isolationBookieGroups="a,b", secondaryIsolationBookieGroups="c"),
            Isolation(frozenset("ab"), frozenset("c")),
            id="both",
        ),
        pytest.param(
            config(isolationBookieGroups=["a", "b"]), Isolation(frozenset("ab")), id="a list"
        ),
        pytest.param(
            config(
                "org.apache.pulsar.zookeeper.ZkIsolatedBookieEnsemblePlacementPolicy",
                isolationBookieGroups="a",
            ),
            Isolation(frozenset("a")),
            id="the class of older releases",
        ),
        pytest.param(config(isolationBookieGroups=""), None, id="no group"),
        pytest.param(config(isolationBookieGroups="*"), None, id="any group"),
        pytest.param(config("x.Other", isolationBookieGroups="a"), None, id="another policy"),
        pytest.param(((CONFIG_KEY, b"{"),), None, id="unreadable"),
        pytest.param(((CONFIG_KEY, b'{"a":' * 60_000),), None, id="deeply nested"),
    ],
)
def test_the_metadata_names_the_isolation_groups(
    custom: tuple[tuple[str, bytes], ...], isolation: Isolation | None
) -> None:
    assert isolation_of(metadata(custom)) == isolation


# --- The rule -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("writable", "expected"),
    [
        pytest.param((B1, B2, B3, B5, B6), {B1, B2, B3, B4}, id="enough in the primary"),
        pytest.param((B1, B2, B5, B6), {B1, B2, B3, B4, B5}, id="the secondary helps out"),
        pytest.param(
            (B1, B6, B8),
            {B1, B2, B3, B4, B5, B8},
            id="then any bookie without a group, and no other",
        ),
    ],
)
def test_secondary_groups_count_if_primary_ones_have_too_few(
    writable: tuple[BookieId, ...], expected: set[BookieId]
) -> None:
    groups = {name: frozenset(bookies) for name, bookies in GROUPS.items()}
    isolation = Isolation(frozenset("a"), frozenset("b"))

    assert bookies_within(isolation, groups, writable, ensemble_size=3) == expected


async def isolated(groups: Mapping[str, tuple[BookieId, ...]] = GROUPS) -> Cluster:
    cluster = await Cluster.start(B1, B2, B3, B4, B5, B6, B7)
    text = {name: {b: {"rack": "/r"} for b in bookies} for name, bookies in groups.items()}
    await cluster.store.create(PULSAR_RACKS_PATH, json.dumps(text).encode())
    return cluster


@pytest.mark.parametrize(("may_leave", "is_bound"), [(False, True), (True, False)])
async def test_a_setting_allows_copies_outside_the_groups(may_leave: bool, is_bound: bool) -> None:
    """It counts when no bookie of the groups is left."""
    cluster = await isolated()
    groups = IsolationGroups(cluster.store, cluster.clock, may_leave=may_leave)
    await groups.refresh()

    allowed = groups.allowed(metadata(PRIMARY_A), {B1, B2, B5, B6})

    assert (allowed is not None) is is_bound


async def test_unreadable_groups_leave_the_last_ones_in_force() -> None:
    cluster = await isolated()
    groups = IsolationGroups(cluster.store, cluster.clock)
    await groups.refresh()

    with capture_logs() as events:
        await cluster.store.set(PULSAR_RACKS_PATH, b"[", version=-1)
        assert not await groups.refresh()
        assert not await groups.refresh()

    assert [e["event"] for e in events] == ["isolation.unreadable"]
    assert groups.allowed(metadata(PRIMARY_A), {B1, B5}) == frozenset({B1, B2, B3, B4})


async def test_denied_access_to_the_groups_does_not_end_the_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def refused(path: str) -> AsyncGenerator[None, None]:
        raise UnauthorizedError("the ACL shuts us out")
        yield

    cluster = await isolated()
    monkeypatch.setattr(cluster.store, "watch", refused)
    groups = IsolationGroups(cluster.store, cluster.clock)

    following = asyncio.create_task(groups.run())
    await cluster.clock.sleep(1)

    assert not following.done()
    following.cancel()


# --- Repairs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
async def test_copies_stay_in_the_primary_group(seed: int) -> None:
    cluster = await isolated()
    cluster.seed = seed
    await cluster.write_ledger((B1, B2, B3), custom=PRIMARY_A)
    await cluster.mark(B2)
    await cluster.kill(B2)

    async with cluster.node() as node:
        outcome = await node.repairer.repair(await node.lease())

    assert outcome.kind is OutcomeKind.DONE
    assert await cluster.ensembles() == [(B1, B4, B3)]


async def test_without_the_primary_group_copies_use_the_secondary() -> None:
    cluster = await isolated()
    await cluster.write_ledger((B1, B2, B3), custom=A_THEN_B)
    await cluster.mark(B2)
    for bookie in (B2, B4):
        await cluster.kill(bookie)

    async with cluster.node() as node:
        assert (await node.repairer.repair(await node.lease())).kind is OutcomeKind.DONE

    assert await cluster.ensembles() == [(B1, B5, B3)]


async def test_without_any_bookie_of_the_groups_the_ledger_waits() -> None:
    """The reason is noted."""
    cluster = await isolated()
    await cluster.write_ledger((B1, B2, B3), custom=PRIMARY_A)
    await cluster.mark(B2)
    for bookie in (B2, B4):
        await cluster.kill(bookie)

    async with cluster.node() as node:
        outcome = await node.repairer.repair(await node.lease())

    assert outcome.reason is Reason.NO_TARGET
    assert (Exclusion.ISOLATED, 3) in (blocked_by(outcome).facts.excluded or ())
    assert await cluster.ensembles() == [(B1, B2, B3)]


async def test_a_member_outside_the_groups_gets_its_missing_entries() -> None:
    cluster = await isolated()
    await cluster.write_ledger((B1, B2, B6), custom=PRIMARY_A)
    cluster.bookies.bookie(B6).lose(LEDGER, 1)
    await cluster.mark(B6)

    async with cluster.node() as node:
        assert (await node.repairer.repair(await node.lease())).kind is OutcomeKind.DONE

    await cluster.assert_whole()


async def test_replacements_in_a_recovery_are_of_the_groups() -> None:
    cluster = await isolated()
    views = ViewSource(Registration(cluster.store, ROOT), cluster.clock)
    await views.refresh()
    groups = IsolationGroups(cluster.store, cluster.clock)
    await groups.refresh()
    target_selector = TargetSelector(
        RandomPlacement(random.Random(1)), clock=cluster.clock, allowed=groups.allowed
    )

    found = target_selector.candidates(views.current, metadata(PRIMARY_A))

    assert {each.bookie for each in found} == {B1, B2, B3, B4}


async def test_a_recovered_ledger_stays_in_the_groups() -> None:
    cluster = await isolated()
    await cluster.write_ledger(
        (B1, B2, B3), write_quorum=3, ack_quorum=2, custom=PRIMARY_A, state=LedgerState.OPEN
    )
    await cluster.mark(B2)
    await cluster.kill(B2)

    async with cluster.node() as node:
        lease = await node.lease()
        outcome = await node.repairer.repair(lease)
        outcome = await node.repairer.repair(lease, outcome.sighting)

    assert outcome.kind is OutcomeKind.DONE
    assert (await cluster.metadata()).bookies == {B1, B3, B4}
