"""``bookmender history``: its texts and filters, and the orders that commands record."""

import json
from typing import Any

import pytest
from structlog.testing import capture_logs

from daemon.admin_session import operator, order_event
from daemon.cli import history as history_command
from daemon.cli.history import history
from daemon.operations import switch
from daemon.operations.checks import force_check, pause_checks, resume_checks
from daemon.operations.drains import cancel_drains, order_drains
from daemon.operations.history import event_text, select
from daemon.operations.holds import begin_hold, end_hold
from daemon.operations.identities import give_trust, withdraw_trust
from daemon.operations.limits import change_limits
from daemon.operations.maintenance import end_window, open_window
from ledgers.errors import UnauthorizedError
from replication.history import (
    Cause,
    Event,
    Kind,
    NodeEvent,
    RecordedHistory,
    read_history,
    record_order,
)
from replication.orders import LimitsOrder
from tests.daemon.in_memory import InMemory
from tests.daemon.visits import visiting
from tests.replication.cluster import Cluster, in_virtual_time
from tests.replication.ledger_values import B1, B2
from tests.replication.nodes import PATHS
from tests.said import Said

AT_MS = 1_700_000_000_000
"""2023-11-14 22:13:20 UTC."""

EVENTS = [
    Event(kind=Kind.BOOKIE_LOST, at_ms=AT_MS, bookies=(B1,), since_ms=AT_MS - 30_000),
    Event(kind=Kind.BOOKIE_REFORMATTED, bookies=(B1,)),
    Event(kind=Kind.BOOKIE_RETURNED, bookies=(B1,)),
    Event(kind=Kind.LOSS_ENDED, bookies=(B1,)),
    Event(
        kind=Kind.LEDGERS_MARKED,
        at_ms=AT_MS,
        until_ms=AT_MS + 60_000,
        bookies=(B1,),
        cause=Cause.LOST,
        ledger_count=1_234,
    ),
    Event(kind=Kind.LEDGERS_REPAIRED, ledger_count=1, entry_count=1_000, entry_bytes=5_000),
    Event(kind=Kind.LEDGERS_REPAIRED, entry_count=1, entry_bytes=5),
    *(
        Event(kind=Kind.LEDGERS_REPAIRED, ledger_count=9, cause=cause, bookies=(B1,))
        for cause in (*Cause, "sung")
    ),
    Event(kind=Kind.LEDGERS_REPAIRED, ledger_count=9, cause=Cause.REFORMATTED, bookies=(B1, B2)),
    Event(kind=Kind.LEDGERS_REPAIRED, ledger_count=9, cause=Cause.DRAINED),
    Event(kind=Kind.LEDGER_FENCED, ledger_id=7),
    Event(kind=Kind.LEDGER_FENCED, ledger_id=7, cause=Cause.LOST, bookies=(B1,)),
    Event(kind=Kind.LEDGER_FENCED, ledger_id=7, cause=Cause.DRAINED, bookies=(B1,)),
    Event(kind=Kind.LEDGER_RECOVERED, ledger_id=7, last_entry_id=41),
    Event(kind=Kind.LEDGER_RECOVERED, ledger_id=7, last_entry_id=-1),
    Event(kind=Kind.RECOVERY_UNFINISHED, ledger_id=7, reason="no answer"),
    Event(kind=Kind.LEADER_ELECTED),
    Event(kind=Kind.HOLD_BEGAN, bookies=(B1, B2), reason="2 of 3", ends_ms=AT_MS),
    Event(kind=Kind.HOLD_ENDED, cause="returned"),
    Event(kind=Kind.CHECK_FINISHED, cause="replicas", ledger_count=9, counts={"marked": 2}),
    Event(kind=Kind.FINDING, ledger_id=7, bookies=(B1,), cause="replicas", reason="lacks 2"),
    order_event("bookie maintenance", bookies=(B1,), by="me@host", ends_ms=AT_MS, reason="disk"),
    order_event("ledger close", ledger_id=7, last_entry_id=3, by="me@host"),
    order_event("limits", counts={"bytes_per_s": 5_000}, by="me@host"),
    Event(kind=Kind.NOT_RECORDED, event_count=12),
    Event(kind="bookie-sang", bookies=(B1,), reason="loud"),
]


def test_each_event_is_one_clause(said: Said) -> None:
    assert {event.kind for event in EVENTS} >= set(Kind)
    said("history", {"events": "\n".join(f"{each.kind}: {event_text(each)}" for each in EVENTS)})


@pytest.mark.parametrize(
    ("filters", "is_shown"),
    [
        pytest.param({}, True, id="no filter"),
        pytest.param({"kinds": ["finding", "order"]}, True, id="its kind"),
        pytest.param({"kinds": ["order"]}, False, id="another kind"),
        pytest.param({"ledger_id": 7}, True, id="its ledger"),
        pytest.param({"ledger_id": 0}, False, id="another ledger"),
        pytest.param({"bookie": B1}, True, id="its bookie"),
        pytest.param({"bookie": B2, "ledger_id": 7}, False, id="another bookie"),
    ],
)
def test_events_are_filtered(filters: dict[str, Any], is_shown: bool) -> None:
    event = Event(kind=Kind.FINDING, ledger_id=7, bookies=(B1,))

    recorded = RecordedHistory(events=(NodeEvent(node="n", event=event),))

    assert bool(select(recorded, since_ms=0, limit=9, **filters).events) is is_shown


# --- The command ----------------------------------------------------------------------------------


async def three_events(cluster: Cluster) -> None:
    for ledger_id in (1, 2, 3):
        event = order_event("repair", ledger_id=ledger_id, by="me@host\x1b[31m")
        await record_order(cluster.store, PATHS, node="host-a", events=[event])
    await cluster.store.create(f"{PATHS.history}/rubbish", b"{")


@pytest.fixture(autouse=True)
def _at_the_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_command, "SystemClock", EpochClock)


def test_the_last_events_are_shown_and_the_rest_is_told(in_memory: InMemory) -> None:
    result, _ = in_memory(history, "--limit", "2", prepare=three_events)

    lines = result.stdout.splitlines()
    assert [line.partition("  ")[2] for line in lines] == [
        "host-a  bookmender repair ledger 2 by me@host\\x1b[31m",
        "host-a  bookmender repair ledger 3 by me@host\\x1b[31m",
    ]
    assert "1 earlier event not shown" in result.stderr
    assert f"{PATHS.history}/rubbish cannot be read" in result.stderr
    assert result.exit_code == 0


def test_the_json_names_what_is_missing(in_memory: InMemory) -> None:
    found = json.loads(
        in_memory(history, "--ledger", "2", "-o", "json", prepare=three_events)[0].stdout
    )

    assert [event["ledger_id"] for event in found["events"]] == [2]
    assert found["unreadable_records"] == [f"{PATHS.history}/rubbish"]


class EpochClock:
    def wall_ms(self) -> int:
        return AT_MS


# --- Orders ---------------------------------------------------------------------------------------


@in_virtual_time
async def test_orders_are_recorded_with_user_and_host() -> None:
    cluster = await Cluster.start()
    here, clock = visiting(cluster), cluster.clock
    await cluster.store.create(PATHS.recovery_delay, b"0", with_parents=True)

    await switch.switch_off(here)
    await switch.switch_off(here)  # changes nothing
    await switch.switch_on(here)
    await begin_hold(here, duration_s=60, reason="network", clock=clock)
    await end_hold(here, [B1], clock=clock)
    await order_drains(here, [B1], may_fence=True, clock=clock)
    await order_drains(here, [B1], may_fence=None, clock=clock)  # changes nothing
    await cancel_drains(here, [B1])
    await open_window(here, B1, duration_s=60, reason="disk", clock=clock)
    await end_window(here, B1)
    await change_limits(here, LimitsOrder(bytes_per_s=7, yields_to_writers=True), reset=False)
    await change_limits(here, LimitsOrder(), reset=True)
    await pause_checks(here, clock=clock)
    await resume_checks(here)
    await force_check(here, "bookies")
    await give_trust(here, [B2])
    await withdraw_trust(here)

    events = [noted.event for noted in (await read_history(cluster.store, PATHS)).events]
    assert {event.by for event in events} == {operator()}
    assert sorted(event.order for event in events) == sorted(
        [
            "disable",
            "enable",
            "hold begin",
            "hold end",
            "bookie drain --fence-open",
            "bookie drain --cancel",
            "bookie maintenance",
            "bookie maintenance --end",
            "limits",
            "limits --reset",
            "check pause",
            "check resume",
            "check run",
            "bookie trust-identities",
            "bookie trust-identities --withdraw",
        ]
    )
    assert [dict(e.counts) for e in events if e.counts] == [
        {"bytes_per_s": 7, "yields_to_writers": 1}
    ]


@in_virtual_time
async def test_an_order_that_cannot_be_recorded_is_carried_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = await Cluster.start()
    here = visiting(cluster)
    create = here.store.create

    async def create_if_allowed(path: str, *arguments: Any, **options: Any) -> str:
        if path.startswith(PATHS.history):
            raise UnauthorizedError("the ACL shuts us out")
        return await create(path, *arguments, **options)

    monkeypatch.setattr(here.store, "create", create_if_allowed)
    with capture_logs() as logs:
        assert (await switch.switch_off(here)).has_changed

    assert [(line["event"], line["order"]) for line in logs] == [
        ("history.order_not_recorded", "disable")
    ]
    assert await cluster.store.exists(PATHS.disable) is not None
