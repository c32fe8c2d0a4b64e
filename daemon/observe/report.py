"""One look of observe mode as JSON and as text."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from auditor.observer import AffectedBookie, BookieCondition, Observation
from daemon.cli.hold import hold_record, hold_text
from daemon.cli.plan import to_json as plan_record
from daemon.observe.observing import Sight
from daemon.previews import Previews
from daemon.words import counted, duration_text, printable, shortened
from ledgers.sizes import size_text

SHOWN_MAX = 20
"""Number of ledgers or bookies that are listed by name; the others are only counted."""


def to_record(sight: Sight) -> dict[str, Any]:
    """Return what was seen as JSON. docs/json.md describes the fields."""
    seen = sight.observation
    return {
        "version": 1,
        "seen_ms": seen.seen_ms,
        "ledger_map": {
            "is_complete": seen.is_ledger_map_complete,
            "ledgers": seen.ledger_count,
            **_first("unreadable", seen.unreadable),
        },
        "bookies": {
            "writable": seen.writable_count,
            "read_only": seen.read_only_count,
            "affected": [_affected_record(row) for row in seen.affected],
        },
        "recovery_delay_s": seen.recovery_delay_s,
        "is_disabled": seen.is_disabled,
        "hold": seen.hold and {**hold_record(seen.hold), "is_ordered": seen.is_hold_ordered},
        "underreplicated": {
            "ledgers": len(seen.underreplicated),
            "by_copies_left": {str(left): count for left, count in seen.by_copies_left.items()},
            "lost_bytes": seen.lost_bytes,
            "first_ledgers": [each.ledger_id for each in seen.underreplicated[:SHOWN_MAX]],
        },
        "would_mark": len(seen.would_mark),
        "marks": {
            "total": seen.queued_count,
            "shared": seen.marked_count,
            "agreed": seen.difference.agreed_count,
            **_first("unmarked", seen.difference.unmarked),
            **_first("partly_marked", seen.difference.partly_marked),
            **_first("surplus", seen.difference.surplus),
            **_first("private", seen.private.ledger_ids),
            **_first("private_damaged", seen.private.damaged),
        },
        "would_repair": plan_record(sight.plan),
    }


def _first(name: str, ledger_ids: Sequence[int]) -> dict[str, Any]:
    """Return the number of these ledgers, and the first of them."""
    return {name: len(ledger_ids), f"{name}_ledgers": list(ledger_ids[:SHOWN_MAX])}


def _affected_record(row: AffectedBookie) -> dict[str, Any]:
    return {
        "bookie": row.bookie,
        "state": row.condition.value,
        "left_s": round(row.left_s),
        "ledgers": row.ledger_count,
    }


# --- Text -----------------------------------------------------------------------------------------


def to_text(sight: Sight) -> str:
    """Return the look as lines of text, the most important first."""
    seen = sight.observation
    sections = [
        ("DISABLED", ["auto-recovery is disabled: nothing is marked"] if seen.is_disabled else []),
        ("HOLD", _hold(seen)),
        ("affected", _affected(seen)),
        ("would mark", _would_mark(seen)),
        ("marks", _marks(seen)),
        ("would copy", _plan(sight.plan)),
        ("bookies", _bookies(seen)),
        ("ledgers", _ledger_map(seen)),
    ]
    return "\n".join(
        f"{'' if number else label:<12}{line}"
        for label, lines in sections
        for number, line in enumerate(lines)
    )


def _hold(seen: Observation) -> list[str]:
    if seen.hold is None:
        return []
    if seen.is_hold_ordered:
        return [hold_text(seen.hold, now_ms=seen.seen_ms)]
    return [f"a bookmender leader would begin a safety hold: {printable(seen.hold.reason)}"]


def _affected(seen: Observation) -> list[str]:
    if not seen.affected:
        return ["no bookie"]
    width = max(len(row.bookie) for row in seen.affected[:SHOWN_MAX])
    lines = [
        f"{row.bookie:<{width}}  {_state(row, seen)}, {counted(row.ledger_count, 'ledger')}"
        for row in seen.affected[:SHOWN_MAX]
    ]
    more = len(seen.affected) - SHOWN_MAX
    return [*lines, f"and {more} more"] if more > 0 else lines


def _state(row: AffectedBookie, seen: Observation) -> str:
    match row.condition:
        case BookieCondition.LOST:
            return "lost when the safety hold ends" if seen.hold is not None else "lost"
        case BookieCondition.ABSENT:
            return f"absent, lost in {duration_text(row.left_s)}"
        case BookieCondition.REFORMATTED:
            return "reformatted, may lack its earlier copies"


def _would_mark(seen: Observation) -> list[str]:
    if not seen.underreplicated:
        return ["no ledger"]
    total = (
        f"{counted(len(seen.underreplicated), 'ledger')}, about {size_text(seen.lost_bytes)} of "
        "copies lost"
    )
    is_kept = seen.is_kept_from_marking
    return [
        f"no ledger now; otherwise {total}" if is_kept else f"{total}; most urgent first",
        *(
            f"  {count:,} with {left} {'copy' if left == 1 else 'copies'} left"
            for left, count in seen.by_copies_left.items()
        ),
        f"  ledger {_ids([each.ledger_id for each in seen.underreplicated])}",
    ]


def _marks(seen: Observation) -> list[str]:
    difference, total = seen.difference, counted(seen.queued_count, "ledger")
    groups = [
        ("lack a mark that a leader would make", difference.unmarked),
        ("have a mark that names too few bookies", difference.partly_marked),
        ("have a mark that a leader would not make", difference.surplus),
        ("in bookmender's private queue, with damage that Java does not see", seen.private.damaged),
        ("in bookmender's private queue, to drain or repair by hand", seen.private.others),
    ]
    return [
        f"{total} marked, {difference.agreed_count} as a bookmender leader would",
        *(f"  {len(ids):,} {what}: ledger {_ids(ids)}" for what, ids in groups if ids),
    ]


def _plan(plan: Previews) -> list[str]:
    if not plan.ledgers:
        return [f"{counted(plan.more, 'ledger')} not planned" if plan.more else "nothing"]
    entry_count = sum(each.entry_count for each in plan.ledgers)
    byte_count = sum(each.byte_count for each in plan.ledgers)
    blocked = Counter(reason.reason.value for each in plan.ledgers for reason in each.plan.blocked)
    return [
        f"{entry_count:,} {'entry' if entry_count == 1 else 'entries'} of "
        f"{counted(len(plan.ledgers), 'ledger')}, about {size_text(byte_count)}"
        + (f"; {counted(plan.more, 'more ledger')} not planned" if plan.more else ""),
        *(
            f"  blocked, {counted(count, 'time')}: {reason}"
            for reason, count in blocked.most_common()
        ),
    ]


def _bookies(seen: Observation) -> list[str]:
    delay = duration_text(seen.recovery_delay_s)
    return [
        f"{seen.writable_count} writable, {seen.read_only_count} read-only; "
        f"an absent bookie is lost after {delay}"
    ]


def _ledger_map(seen: Observation) -> list[str]:
    text = f"{seen.ledger_count:,} known" + ("" if seen.is_ledger_map_complete else " so far")
    if seen.unreadable:
        text += f", metadata of {len(seen.unreadable)} unreadable: {_ids(seen.unreadable)}"
    return [text]


def _ids(ledger_ids: Sequence[int]) -> str:
    return shortened(ledger_ids, at_most=SHOWN_MAX)
