"""What observe mode saw at one look, for people and for programs."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from auditor.observation import Absence, MissingBookie, Observation
from daemon.cli.hold import hold_record, hold_text
from daemon.cli.plan import to_json as plan_record
from daemon.cli.progress import counted, duration_text, printable
from daemon.observe.observing import Sight
from daemon.previews import Previews
from ledgers.sizes import size_text

SHOWN_MAX = 20
"""Ledgers, or bookies, that are named; a count tells of the rest."""


def to_record(sight: Sight) -> dict[str, Any]:
    """For programs; ``bookmender observe --help`` says what its parts mean."""
    seen = sight.observation
    return {
        "version": 1,
        "seen_ms": seen.seen_ms,
        "index": {
            "is_complete": seen.is_index_complete,
            "ledgers": seen.ledger_count,
            "unreadable": len(seen.unreadable),
            "unreadable_ledgers": list(seen.unreadable[:SHOWN_MAX]),
        },
        "bookies": {
            "writable": seen.writable_count,
            "read_only": seen.read_only_count,
            "missing": [_missing_record(row) for row in seen.missing],
        },
        "recovery_delay_s": seen.recovery_delay_s,
        "is_disabled": seen.is_disabled,
        "hold": _hold_record(seen),
        "endangered": {
            "ledgers": len(seen.underreplicated),
            "by_copies_left": {str(left): count for left, count in seen.by_copies_left.items()},
            "lost_bytes": seen.lost_bytes,
            "first_ledgers": [each.ledger_id for each in seen.underreplicated[:SHOWN_MAX]],
        },
        "would_mark": len(seen.would_mark),
        "marks": {
            "total": seen.queued_count,
            "standing": seen.marked_count,
            "agreed": seen.difference.agreed_count,
            "unmarked": len(seen.difference.unmarked),
            "unmarked_ledgers": list(seen.difference.unmarked[:SHOWN_MAX]),
            "partly_marked": len(seen.difference.partly_marked),
            "partly_marked_ledgers": list(seen.difference.partly_marked[:SHOWN_MAX]),
            "surplus": len(seen.difference.surplus),
            "surplus_ledgers": list(seen.difference.surplus[:SHOWN_MAX]),
            "own_marked": len(seen.own),
            "own_marked_ledgers": seen.own.ledger_ids[:SHOWN_MAX],
            "own_damaged": len(seen.own.damaged),
            "own_damaged_ledgers": list(seen.own.damaged[:SHOWN_MAX]),
        },
        "would_repair": plan_record(sight.plan),
    }


def _missing_record(row: MissingBookie) -> dict[str, Any]:
    return {
        "bookie": row.bookie,
        "state": row.absence.value,
        "left_s": round(row.left_s),
        "ledgers": row.ledger_count,
    }


def _hold_record(seen: Observation) -> dict[str, Any] | None:
    if seen.hold is None:
        return None
    return {**hold_record(seen.hold), "is_ordered": seen.is_hold_ordered}


# --- For people ----------------------------------------------------------------------------------------


def to_text(sight: Sight) -> str:
    """A fact a line, what a person is to look at first."""
    seen = sight.observation
    return "\n".join(
        [
            *_holds(seen),
            *_labelled("missing", _missing(seen)),
            *_labelled("would mark", _would_mark(seen)),
            *_labelled("marks", _marks(seen)),
            *_labelled("would copy", _plan(sight.plan)),
            *_labelled("bookies", [_bookies(seen)]),
            *_labelled("ledgers", [_index(seen)]),
        ]
    )


def _labelled(label: str, lines: Sequence[str]) -> list[str]:
    return [f"{'' if place else label:<12}{line}" for place, line in enumerate(lines)]


def _holds(seen: Observation) -> list[str]:
    lines = []
    if seen.is_disabled:
        lines += _labelled("DISABLED", ["auto-recovery is switched off: nothing is marked"])
    if seen.hold is not None:
        told = hold_text(seen.hold, now_ms=seen.seen_ms)
        if not seen.is_hold_ordered:
            told = f"a leader of ours would hold: {printable(seen.hold.reason)}"
        lines += _labelled("HOLD", [told])
    return lines


def _missing(seen: Observation) -> list[str]:
    if not seen.missing:
        return ["no bookie"]
    width = max(len(row.bookie) for row in seen.missing[:SHOWN_MAX])
    lines = [
        f"{row.bookie:<{width}}  {_state(row, seen)}, {counted(row.ledger_count, 'ledger')}"
        for row in seen.missing[:SHOWN_MAX]
    ]
    more = len(seen.missing) - SHOWN_MAX
    return [*lines, f"and {more} more"] if more > 0 else lines


def _state(row: MissingBookie, seen: Observation) -> str:
    match row.absence:
        case Absence.LOST:
            return "held" if seen.hold is not None else "lost"
        case Absence.WAITING:
            return f"away, lost in {duration_text(row.left_s)}"
        case Absence.REBORN:
            return "set up anew, may lack what it held before"


def _would_mark(seen: Observation) -> list[str]:
    if not seen.underreplicated:
        return ["no ledger"]
    ledgers = counted(len(seen.underreplicated), "ledger")
    weight = f"about {size_text(seen.lost_bytes)} of copies lost"
    first = (
        f"no ledger now; otherwise {ledgers}, {weight}"
        if seen.is_kept_from_marking
        else f"{ledgers}, {weight}; most endangered first"
    )
    return [
        first,
        *(f"  {count:,} with {_copies(left)} left" for left, count in seen.by_copies_left.items()),
        f"  ledger {_ids([each.ledger_id for each in seen.underreplicated])}",
    ]


def _copies(count: int) -> str:
    return f"{count} copy" if count == 1 else f"{count} copies"


def _marks(seen: Observation) -> list[str]:
    difference = seen.difference
    lines = [
        f"{counted(seen.queued_count, 'ledger')} marked, {difference.agreed_count} as we would"
    ]
    if difference.unmarked:
        count = len(difference.unmarked)
        lines.append(f"  {count:,} we would mark are not: ledger {_ids(difference.unmarked)}")
    if difference.partly_marked:
        count = len(difference.partly_marked)
        lines.append(
            f"  {count:,} are marked for fewer bookies than we would: "
            f"ledger {_ids(difference.partly_marked)}"
        )
    if difference.surplus:
        count = len(difference.surplus)
        lines.append(f"  {count:,} we would not mark are: ledger {_ids(difference.surplus)}")
    for ledger_ids, what in (
        (seen.own.damaged, "with damage that Java's workers do not see"),
        (seen.own.others, "to be drained or repaired by hand"),
    ):
        if ledger_ids:
            count = len(ledger_ids)
            lines.append(f"  {count:,} in our private queue, {what}: ledger {_ids(ledger_ids)}")
    return lines


def _plan(plan: Previews) -> list[str]:
    if not plan.ledgers:
        return [f"{counted(plan.more, 'ledger')} not planned for" if plan.more else "nothing"]
    entry_count = sum(each.entry_count for each in plan.ledgers)
    byte_count = sum(each.byte_count for each in plan.ledgers)
    more = f"; {counted(plan.more, 'ledger')} more not planned for" if plan.more else ""
    lines = [
        f"{entry_count:,} {'entry' if entry_count == 1 else 'entries'} of {counted(len(plan.ledgers), 'ledger')}, "
        f"about {size_text(byte_count)}{more}"
    ]
    blocked = Counter(reason.reason.value for each in plan.ledgers for reason in each.plan.blocked)
    lines += [
        f"  in the way, {counted(count, 'time')}: {reason}"
        for reason, count in blocked.most_common()
    ]
    return lines


def _bookies(seen: Observation) -> str:
    return (
        f"{seen.writable_count} writable, {seen.read_only_count} read-only; "
        f"lost after {duration_text(seen.recovery_delay_s)} away"
    )


def _index(seen: Observation) -> str:
    text = f"{seen.ledger_count:,} known" + ("" if seen.is_index_complete else " so far")
    if seen.unreadable:
        text += f", the metadata of {len(seen.unreadable)} unreadable: {_ids(seen.unreadable)}"
    return text


def _ids(ledger_ids: Sequence[int]) -> str:
    shown = ", ".join(map(str, ledger_ids[:SHOWN_MAX]))
    return shown + (", …" if len(ledger_ids) > SHOWN_MAX else "")
