"""What ``bookmender plan`` prints, for people and for programs."""

from daemon.plan_command import to_json, to_text
from daemon.planning import Previews
from replication.planning.plan import Plan, Repair
from replication.planning.preview import Preview
from replication.reasons import Blocked, Reason
from tests.replication.ledger_values import B2, B5, fragment

MOVE = Repair(fragment=fragment(), index=1, target=B5, entry_ids=range(7), byte_count=7_000)
REFILL = Repair(fragment=fragment(), index=1, target=B2, entry_ids=(4,), byte_count=100)
WAIT = Blocked(reason=Reason.MAINTENANCE, detail="b1 is away", until_ms=1_700_000_000_000)


def previews(*plans: Plan, more: int | None = 0) -> Previews:
    found = [Preview(ledger_id=7 + place, plan=each) for place, each in enumerate(plans)]
    return Previews(ledgers=found, more=more)


def test_each_copy_is_a_line_and_what_is_in_the_way_as_well() -> None:
    text = to_text(previews(Plan(repairs=(MOVE, REFILL), blocked=(WAIT,)), Plan()))

    assert text.splitlines() == [
        "ledger 7: 8 entries to copy, about 7.1 kB",
        f"  entries 0 to 9, index 1: 7 entries from the others' copies, {B2} -> {B5}",
        f"  entries 0 to 9, index 1: 1 entries back to {B2}",
        "  in the way: maintenance: b1 is away",
        "ledger 8: nothing to do",
        "2 ledgers, 8 entries to copy, about 7.1 kB",
    ]


def test_ledgers_that_are_not_shown_are_counted_or_at_least_hinted_at() -> None:
    assert to_text(previews(Plan(), more=12)).endswith("; 12 more ledgers not shown (--limit)")
    assert to_text(previews(Plan(), more=None)).endswith("; there are more ledgers (--limit)")


def test_a_ledger_that_is_gone_and_one_that_only_waits_say_so() -> None:
    gone = Preview(ledger_id=1, plan=Plan(), is_gone=True)
    stuck = Preview(ledger_id=2, plan=Plan(blocked=(WAIT,)))

    lines = to_text(Previews(ledgers=[gone, stuck], more=0)).splitlines()

    assert lines[0] == "ledger 1: there is none"
    assert lines[1] == "ledger 2: nothing can be copied now"


def test_a_program_gets_every_copy_with_its_fragment_and_the_sums() -> None:
    record = to_json(previews(Plan(repairs=(MOVE,), blocked=(WAIT,))))

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
    assert ledger["in_the_way"] == [
        {"reason": "maintenance", "detail": "b1 is away", "until_ms": 1_700_000_000_000}
    ]
