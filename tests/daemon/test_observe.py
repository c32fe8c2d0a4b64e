"""Observe mode of the daemon: text, JSON, exit codes, metrics; and that it writes nothing."""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import REGISTRY
from structlog.testing import capture_logs

from auditor.absence import Outages
from auditor.mark_reasons import PrivateQueue
from auditor.observer import AffectedBookie, BookieCondition, Difference, Observation
from auditor.underreplication import UnderreplicatedLedger
from daemon.admin_session import AdminSession
from daemon.answers import as_json
from daemon.cli.plan import built, outlook_exit_code, outlook_text
from daemon.operations.observe import (
    LOOK_INTERVAL_MIN_S,
    LOOK_INTERVAL_S,
    Observing,
    Outlook,
    Reports,
    observe,
    outlook,
)
from daemon.operations.plan import LedgerPlan, RepairPlan, ledger_plan
from ledgers.codec.layout import Layout
from ledgers.errors import BookmenderError, UnauthorizedError, UnavailableError
from ledgers.manager import LedgerManager
from ledgers.model import LedgerState
from ledgers.placement import RandomPlacement
from ledgers.placement.topology import Racks
from ledgers.registration import Registration
from ledgers.tasks import task_scope
from replication.by_hand import Preview, Previewer
from replication.cluster import ViewSource
from replication.inspection import Inspector
from replication.orders import HoldOrder, OrderStore
from replication.plan import Plan, Repair
from replication.reasons import Blocked, Facts, Reason
from replication.targets import TargetSelector
from tests.auditor.scenes import with_ledgers
from tests.daemon.visits import visiting
from tests.memory.store import MemoryStore
from tests.replication.cluster import DIGEST, Cluster, in_virtual_time, shut_out
from tests.replication.ledger_values import B1, B2, B3, B4, B5, fragment
from tests.replication.nodes import PATHS, ROOT
from tests.replication.test_preview import touching_nothing
from tests.said import Said

COPY = Repair(fragment=fragment(), index=1, target=B5, entry_ids=range(7), byte_count=7_000)
WAIT = Blocked(reason=Reason.NO_TARGET, facts=Facts(errors=("no bookie can take over",)))
LOST = AffectedBookie(bookie=B1, state=BookieCondition.LOST, ledgers=2)
SEEN_NOTHING = Observation(
    seen_ms=1_700_000_000_000,
    is_ledger_map_complete=True,
    ledger_count=1_200,
    unreadable=(),
    writable_count=3,
    read_only_count=1,
    recovery_delay_s=90,
    affected=(),
    underreplicated=(),
    lost_bytes=0,
    marked_count=0,
    difference=Difference(agreed_count=0, unmarked=(), partly_marked=(), surplus=()),
    is_disabled=False,
    hold=None,
    is_hold_ordered=False,
)
NOTHING = outlook(SEEN_NOTHING, RepairPlan.of([]))


def seeing(**fields: object) -> Outlook:
    """Return a look that saw only these fields."""
    return outlook(replace(SEEN_NOTHING, **fields), RepairPlan.of([]))  # type: ignore[arg-type]


def underreplicated(*ledger_ids: int, copies_left: int = 1) -> tuple[UnderreplicatedLedger, ...]:
    return tuple(
        UnderreplicatedLedger(ledger_id=each, lost=(B1,), copies_left=copies_left, length=100)
        for each in ledger_ids
    )


SEEN_LOSS = replace(
    SEEN_NOTHING,
    affected=(LOST,),
    underreplicated=(*underreplicated(5), *underreplicated(2, 3, copies_left=2)),
    lost_bytes=5_000,
    marked_count=3,
    private=PrivateQueue(damaged=(4,)),
    difference=Difference(agreed_count=1, unmarked=(2,), partly_marked=(3,), surplus=(9,)),
)
LOSS = outlook(
    SEEN_LOSS,
    RepairPlan.of(
        [
            ledger_plan(Preview(ledger_id=5, plan=Plan(repairs=(COPY,)))),
            ledger_plan(Preview(ledger_id=2, plan=Plan(blocked=(WAIT,)))),
        ],
        more=1,
    ),
)


# --- Looks ----------------------------------------------------------------------------------------


@asynccontextmanager
async def observing(cluster: Cluster, *shut: str) -> AsyncIterator[Observing]:
    """Observe in a session that refuses every write, and plan with the worker's own code.

    ``shut``: znodes that ACLs deny.
    """
    store = MemoryStore(cluster.tree).as_read_only()
    shut_out(store, *shut)
    manager = LedgerManager(store, ROOT, Layout.HIERARCHICAL)
    registration = Registration(store, ROOT)
    admin_session = AdminSession(
        settings=visiting(cluster).settings,
        store=store,
        manager=manager,
        registration=registration,
    )
    views = ViewSource(registration, cluster.clock, OrderStore(store, PATHS))
    await views.refresh()
    rng = random.Random(cluster.seed)
    inspector = Inspector(
        manager=manager,
        bookies=cluster.bookies,
        clock=cluster.clock,
        rng=rng,
        fallback_digest=DIGEST,
    )

    async def plans(ledger_ids: Sequence[int]) -> list[LedgerPlan]:
        target_selector = TargetSelector(RandomPlacement(rng), clock=cluster.clock, local=None)
        previewer = Previewer(inspector, target_selector, views.current)
        return [ledger_plan(await previewer.preview(each)) for each in ledger_ids]

    async with (
        task_scope() as beside,
        observe(
            admin_session,
            views,
            Racks(),
            cluster.clock,
            plans=plans,
            outages=Outages(cluster.clock, return_s=60),
        ) as looking,
    ):
        beside.start(views.run())
        yield looking


@in_virtual_time
async def test_rule_s5_observing_a_loss_writes_and_fences_nothing() -> None:
    cluster = await with_ledgers((B1, B2), (B2, B3), (B3, B4))
    await cluster.write_ledger((B1, B2, B3), ledger_id=3, state=LedgerState.OPEN)
    await cluster.kill(B1)
    async with (
        touching_nothing(cluster),
        observing(cluster) as looking,
        aclosing(looking.looks(planned_max=5)) as looks,
    ):
        await anext(looks)
        sight = await anext(looks)

    closed, open_one = sorted(sight.would_repair.ledgers, key=lambda each: each.ledger_id)
    assert (closed.ledger_id, open_one.ledger_id) == (0, 3)
    assert closed.entries == 10
    assert [each.reason for each in open_one.blocked] == [Reason.OPEN_LEDGER_GRACE]


@in_virtual_time
async def test_under_replicated_ledgers_come_first_in_a_bounded_plan() -> None:
    cluster = await with_ledgers((B1, B2), (B3, B2), (B4, B2))
    await cluster.mark(B4, ledger_id=2)
    await cluster.kill(B1)
    async with observing(cluster) as looking, aclosing(looking.looks(planned_max=1)) as looks:
        await anext(looks)
        sight = await anext(looks)
        all_of_it = await looking.look(planned_max=2)

    assert [each.ledger_id for each in sight.would_repair.ledgers] == [0]
    assert sight.would_repair.more_ledgers == 1
    assert [each.ledger_id for each in all_of_it.would_repair.ledgers] == [0, 2]


@in_virtual_time
async def test_ledgers_in_the_private_queue_are_planned_last() -> None:
    cluster = await with_ledgers((B1, B2), (B3, B2), (B3, B4))
    await cluster.store.create(PATHS.private.mark(2), with_parents=True)
    await cluster.store.create(PATHS.private.mark(0), with_parents=True)
    await cluster.mark(B2, ledger_id=1)
    await cluster.kill(B1)
    async with observing(cluster) as looking, aclosing(looking.looks(planned_max=5)) as looks:
        await anext(looks)
        sight = await anext(looks)

    assert [each.ledger_id for each in sight.would_repair.ledgers] == [0, 1, 2]


@in_virtual_time
async def test_looks_follow_the_complete_map_changes_and_an_interval() -> None:
    cluster = await with_ledgers((B1, B2))
    async with observing(cluster) as looking, aclosing(looking.looks(planned_max=0)) as looks:
        assert not (await anext(looks)).ledger_map.is_complete
        began_s = cluster.clock.now_s()
        assert (await anext(looks)).ledger_map.is_complete
        assert cluster.clock.now_s() - began_s == pytest.approx(LOOK_INTERVAL_MIN_S, abs=1)

        await anext(looks)
        waited_s = LOOK_INTERVAL_MIN_S + LOOK_INTERVAL_MIN_S + LOOK_INTERVAL_S
        assert cluster.clock.now_s() - began_s == pytest.approx(waited_s, abs=1)

        await cluster.kill(B1)
        assert (await anext(looks)).would_mark
        assert cluster.clock.now_s() - began_s < waited_s + LOOK_INTERVAL_S


@pytest.mark.parametrize("error", [UnavailableError, UnauthorizedError])
@in_virtual_time
async def test_a_failed_look_is_logged_and_repeated(
    error: type[BookmenderError], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = await with_ledgers((B1, B2))
    async with observing(cluster) as looking, aclosing(looking.looks(planned_max=0)) as looks:
        look, failures = looking.observer.observe, [error("something cannot be read")]

        async def failing_once() -> Observation:
            if failures:
                raise failures.pop()
            return await look()

        monkeypatch.setattr(looking.observer, "observe", failing_once)
        with capture_logs() as logs:
            sight = await anext(looks)

    assert sight.ledger_map.ledgers == 1
    assert [each["error"] for each in logs if each["event"] == "observe.failed"]


@in_virtual_time
async def test_rule_s8_a_denied_listing_of_the_root_is_an_error() -> None:
    cluster = await with_ledgers((B1, B2))
    async with observing(cluster, ROOT) as looking:
        with pytest.raises(UnauthorizedError):
            async with asyncio.timeout(10):
                await built(looking.updater)


@in_virtual_time
async def test_what_a_hidden_directory_leaves_is_shown_as_incomplete() -> None:
    cluster = await with_ledgers((B1, B2))
    await cluster.manager.create(10**9, (await cluster.metadata(0)))
    async with observing(cluster, f"{ROOT}/00/0000") as looking:
        async with asyncio.timeout(10):
            await built(looking.updater)
        sight = await looking.look(planned_max=2)

    assert (sight.ledger_map.ledgers, outlook_exit_code(sight)) == (1, 3)


@in_virtual_time
async def test_a_ledger_with_denied_metadata_is_reported_as_unreadable() -> None:
    cluster = await with_ledgers((B1, B2), (B1, B2))
    async with observing(cluster, cluster.manager.path(1)) as looking:
        async with asyncio.timeout(10):
            await built(looking.updater)
        sight = await looking.look(planned_max=2)

    assert (sight.ledger_map.unreadable_ledgers, sight.ledger_map.is_complete) == ([1], True)
    assert outlook_exit_code(sight) == 3


HELD = {"hold": HoldOrder(since_ms=1), "is_hold_ordered": True}


@pytest.mark.parametrize(
    ("state", "planned"),
    [
        pytest.param({}, [3, 1, 2, 9, 20, 21], id="all that are or would be marked"),
        pytest.param(HELD, [3, 2, 9, 20, 21], id="safety hold: those that are marked"),
        pytest.param({"is_disabled": True}, [], id="disabled: none"),
        pytest.param(HELD | {"is_disabled": True}, [], id="disabled during a safety hold: none"),
    ],
)
def test_what_workers_would_lease_is_planned(state: dict[str, Any], planned: Sequence[int]) -> None:
    difference = Difference(agreed_count=1, unmarked=(1,), partly_marked=(2,), surplus=(9,))
    private = PrivateQueue(damaged=(20,), others=(21,))

    seen = replace(
        SEEN_NOTHING,
        underreplicated=underreplicated(3, 1, 2),
        difference=difference,
        private=private,
        **state,
    )

    assert seen.would_repair == planned


# --- Text, JSON and exit codes --------------------------------------------------------------------


SCENES = {
    "missing copies and the planned work": LOSS,
    "marks in the private queue": seeing(
        marked_count=1, private=PrivateQueue(damaged=(4, 7), others=(9,))
    ),
    "what prevents marking": seeing(
        affected=(LOST,),
        underreplicated=underreplicated(5),
        hold=HoldOrder(since_ms=1, reason="3 of 4 bookies went\x1b[2J"),
        is_disabled=True,
    ),
}


def test_the_outlook_as_text(said: Said) -> None:
    said("outlook", {name: outlook_text(seen) for name, seen in SCENES.items()})


def test_json_has_counts_and_the_first_ids() -> None:
    found = seeing(underreplicated=underreplicated(*range(1_000)), affected=(LOST,))
    record = json.loads(as_json(found))

    assert record["underreplicated"]["by_copies_left"] == {"1": 1_000}
    assert record["would_mark"] == 1_000
    assert record["underreplicated"]["first_ledgers"] == list(range(20))
    assert record["bookies"]["affected"] == [
        {"bookie": B1, "state": "lost", "left_s": 0, "ledgers": 2}
    ]


ABSENT = replace(LOST, state=BookieCondition.ABSENT, left_s=30)


@pytest.mark.parametrize(
    ("sight", "code"),
    [
        pytest.param(NOTHING, 0, id="nothing to do"),
        pytest.param(LOSS, 1, id="something to do"),
        pytest.param(seeing(affected=(ABSENT,)), 1, id="soon, unless the bookie returns"),
        pytest.param(
            seeing(affected=(replace(LOST, ledgers=0),)), 0, id="a bookie without ledgers"
        ),
        pytest.param(seeing(marked_count=1), 1, id="another auditor marked a ledger"),
        pytest.param(
            seeing(private=PrivateQueue(damaged=(4,))),
            1,
            id="damage that Java does not see",
        ),
        pytest.param(
            seeing(private=PrivateQueue(others=(4,))), 0, id="only what an operator ordered"
        ),
        pytest.param(seeing(unreadable=(7,)), 3, id="an unreadable ledger may miss anything"),
        pytest.param(seeing(is_ledger_map_complete=False), 3, id="not all ledgers are known"),
        pytest.param(
            seeing(unreadable=(7,), underreplicated=underreplicated(5)),
            1,
            id="something to do besides",
        ),
    ],
)
def test_the_exit_code_says_whether_there_is_anything_to_do(sight: Outlook, code: int) -> None:
    assert outlook_exit_code(sight) == code


# --- A node ---------------------------------------------------------------------------------------


def test_a_node_reports_its_last_look_in_metrics() -> None:
    reports = Reports()

    reports.show(NOTHING)
    reports.show(LOSS)

    expected = {"would_mark": 3, "unmarked": 1, "surplus": 1, "private_damaged": 1, "is_held": 0}
    for field, count in expected.items():
        assert REGISTRY.get_sample_value("bookmender_observed", {"field": field}) == count, field


def test_only_changes_are_logged() -> None:
    reports = Reports()
    with capture_logs() as logs:
        for found in (NOTHING, NOTHING, LOSS, LOSS):
            reports.show(found)

    marks = [each["would_mark"] for each in logs if each["event"] == "observe.would_mark"]
    plans = [each["byte_count"] for each in logs if each["event"] == "observe.would_repair"]
    assert (marks, plans) == ([0, 3], [0, 7_000])
