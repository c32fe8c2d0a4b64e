"""The output of ``bookmender plan``, as text and as JSON."""

import json
from collections.abc import Collection
from contextlib import nullcontext

import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from auditor.mark_reasons import Finding
from daemon.answers import as_json
from daemon.cli import plan as plan_command
from daemon.cli.plan import SHOWN_MAX, to_text
from daemon.messages import message
from daemon.operations import plan as planning
from daemon.operations.errors import UnknownBookieError
from daemon.operations.plan import RepairPlan, ledger_plan, ledgers_of, plan
from ledgers.model import BookieId
from replication import znodes
from replication.by_hand import Preview
from replication.plan import Plan, Repair
from replication.reasons import Blocked, Facts, Reason
from tests.auditor.scenes import with_ledgers
from tests.daemon.visits import visiting
from tests.replication.cluster import in_virtual_time, shut_out
from tests.replication.ledger_values import B1, B2, B3, B5, fragment
from tests.replication.nodes import PATHS
from tests.said import Said

MOVE = Repair(fragment=fragment(), index=1, target=B5, entry_ids=range(7), byte_count=7_000)
REFILL = Repair(fragment=fragment(), index=1, target=B2, entry_ids=(4,), byte_count=100)
WAIT = Blocked(
    reason=Reason.MAINTENANCE, facts=Facts(in_maintenance=(B1,)), until_ms=1_700_000_000_000
)


def planned(*plans: Plan, more: int | None = 0) -> RepairPlan:
    found = [Preview(ledger_id=7 + place, plan=each) for place, each in enumerate(plans)]
    return RepairPlan.of(list(map(ledger_plan, found)), more=more)


ONE = Repair(fragment=fragment(first=4, last=4), index=1, target=B2, entry_ids=(4,), byte_count=100)
EMPTY = Repair(fragment=fragment(first=0, last=-1), index=1, target=B5, entry_ids=(), byte_count=0)
UNREADABLE = RepairPlan.of([], unreadable=range(100, 130))
SCENES = {
    "copies and an obstacle": planned(Plan(repairs=(MOVE, REFILL), blocked=(WAIT,)), Plan()),
    "one entry, and an empty ledger": planned(Plan(repairs=(ONE,)), Plan(repairs=(EMPTY,))),
    "ledgers that are not shown": planned(Plan(), more=12),
    "an unknown count of others": planned(Plan(), more=None),
    "a deleted and a blocked ledger": RepairPlan.of(
        [
            ledger_plan(Preview(ledger_id=1, plan=Plan(), is_gone=True)),
            ledger_plan(Preview(ledger_id=2, plan=Plan(blocked=(WAIT,)))),
        ]
    ),
    "unreadable metadata": UNREADABLE,
    "many unproven ends": RepairPlan.of([], unproven=range(SHOWN_MAX + 1)),
}


def test_the_plan_as_text(said: Said) -> None:
    assert UNREADABLE.unreadable_ledgers == list(range(100, 130))
    said("plan", {name: to_text(found) for name, found in SCENES.items()})


def test_control_characters_in_a_reason_are_escaped() -> None:
    facts = Facts(in_maintenance=(B1,), comment="new disk\x1b[2J\nledger 9: nothing to do")
    away = replace(WAIT, facts=facts)

    text = to_text(planned(Plan(blocked=(away,))))

    assert "\x1b" not in text
    assert not any(line.startswith("ledger 9") for line in text.splitlines())


def test_the_json_has_every_copy_and_the_sums() -> None:
    record = json.loads(as_json(planned(Plan(repairs=(MOVE,), blocked=(WAIT,)))))

    assert (record["entries"], record["bytes"], record["more_ledgers"]) == (7, 7_000, 0)
    [ledger] = record["ledgers"]
    assert (ledger["ledger_id"], ledger["is_whole"], ledger["is_gone"]) == (7, False, False)
    assert ledger["copies"] == [
        {
            "first_entry_id": 0,
            "last_entry_id": 9,
            "bookie_index": 1,
            "from": B2,
            "to": B5,
            "is_in_place": False,
            "entries": 7,
            "bytes": 7_000,
        }
    ]
    assert ledger["blocked"] == [
        {
            "reason": "maintenance",
            "facts": {"in_maintenance": [B1]},
            "besides": [],
            "detail": message(7, WAIT).text,
            "until_ms": 1_700_000_000_000,
        }
    ]


WHOLE = ledger_plan(Preview(ledger_id=1, plan=Plan()))
GONE = ledger_plan(Preview(ledger_id=2, plan=Plan(), is_gone=True))
LACKING = ledger_plan(Preview(ledger_id=3, plan=Plan(repairs=(MOVE,))))


@pytest.mark.parametrize(
    ("arguments", "found", "exit_code"),
    [
        pytest.param([], RepairPlan.of([]), 0, id="nothing is marked"),
        pytest.param(["1"], RepairPlan.of([WHOLE]), 0, id="whole"),
        pytest.param(["3"], RepairPlan.of([LACKING]), 1, id="something to do"),
        pytest.param(["2"], RepairPlan.of([GONE]), 1, id="named, and deleted"),
        pytest.param([], RepairPlan.of([GONE]), 0, id="marked, and deleted"),
        pytest.param(
            ["--bookie", B1],
            RepairPlan.of([LACKING], unreadable=[7]),
            3,
            id="some are unreadable",
        ),
    ],
)
def test_the_exit_code_depends_on_whether_work_is_left(
    arguments: list[str], found: RepairPlan, exit_code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_command, "run_in_session", lambda config, act: found)

    result = CliRunner().invoke(plan_command.plan, arguments)

    assert result.exit_code == exit_code, result.output


@in_virtual_time
async def test_rule_s8_a_damaged_ledger_may_name_the_bookie() -> None:
    cluster = await with_ledgers((B1, B2), (B2, B3), (B1, B3), (B2, B3))
    for ledger_id, data in ((2, b"?" + B1.encode()), (3, b"?" + B2.encode())):
        await cluster.store.set(cluster.manager.path(ledger_id), data, version=-1)

    assert await ledgers_of(visiting(cluster), B1, limit=9) == ([0], 0, [2, 3])


@in_virtual_time
async def test_rule_s8_a_denied_ledger_may_name_the_bookie() -> None:
    cluster = await with_ledgers((B1, B2), (B2, B3), (B1, B3))
    admin_session = visiting(cluster)
    shut_out(admin_session.store, cluster.manager.path(1))

    assert await ledgers_of(admin_session, B1, limit=9) == ([0, 2], 0, [1])


@in_virtual_time
async def test_bookies_with_findings_are_suspects(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = await with_ledgers((B1, B2), (B2, B3))
    finding = Finding(check="fsck", bookies=(B2,), detail="entry 4 is missing", found_ms=1)
    path = PATHS.finding(1)
    await cluster.store.create(path, finding.to_json(), with_parents=True)
    seen: dict[int, tuple[BookieId, ...]] = {}

    class Noting:
        async def preview(self, ledger_id: int, *, suspects: Collection[BookieId]) -> Preview:
            seen[ledger_id] = tuple(suspects)
            return Preview(ledger_id=ledger_id, plan=Plan())

    monkeypatch.setattr(planning, "open_previewer", lambda *_, **__: nullcontext(Noting()))

    await planning.plan_each(visiting(cluster), [0, 1])

    assert seen == {0: (), 1: (B2,)}


@in_virtual_time
async def test_an_empty_plan_explains_why_nothing_is_marked() -> None:
    cluster = await with_ledgers((B1, B2))
    await cluster.kill(B1)

    found = await plan(visiting(cluster), [], None, limit=1)

    first, _ = to_text(found).splitlines()
    assert first.startswith("no ledger is marked; bookmender status reports: BOOKIES_LOST: ")
    assert "NO_AUDITOR: " in first


@in_virtual_time
async def test_an_empty_plan_of_a_healthy_cluster_needs_no_reason() -> None:
    cluster = await with_ledgers((B1, B2))
    vote = znodes.vote_to_bytes("java:3181")
    await cluster.store.create(f"{PATHS.election}/V_0000000003", vote, with_parents=True)

    found = await plan(visiting(cluster), [], None, limit=1)

    assert to_text(found) == "0 ledgers, 0 entries to copy, about 0 B"
    assert found.none_marked is None


@in_virtual_time
async def test_an_unknown_bookie_is_wrong_usage() -> None:
    cluster = await with_ledgers((B1, B2))

    with pytest.raises(UnknownBookieError, match=r"has no bookie b1:3182\."):
        await plan(visiting(cluster), [], BookieId("b1:3182"), limit=1)
