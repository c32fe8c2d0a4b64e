"""What happened in the cluster, when, and who did it; as answers, and as text for people.

``replication.history`` defines the events. Texts may hold names and error messages from outside, so
callers pass them through ``printable``.
"""

from collections.abc import Collection, Mapping
from datetime import UTC, datetime

from msgspec import structs

from daemon.answers import Answer
from daemon.operations.checks import counts_text
from daemon.words import counted
from ledgers.sizes import size_text
from replication.history import Cause, Event, Kind, RecordedHistory


class EventRecord(Answer, frozen=True, kw_only=True):
    """An event. docs/json.md says what its fields are, and which kinds there are."""

    node: str
    kind: str
    at_ms: int
    until_ms: int | None
    bookies: list[str]
    ledger_id: int | None
    since_ms: int | None
    ends_ms: int | None
    ledger_count: int
    entry_count: int
    entry_bytes: int
    event_count: int
    last_entry_id: int | None
    cause: str
    counts: dict[str, int]
    order: str
    by: str
    reason: str
    text: str
    """What happened, as one clause for people."""


class HistoryRecord(Answer, frozen=True, kw_only=True):
    """Events, the oldest first. ``omitted``: earlier ones of the period that are not listed.
    ``unreadable_records``: znodes that cannot be read, so events may be missing."""

    since_ms: int
    events: list[EventRecord]
    omitted: int
    unreadable_records: list[str]


def select(
    recorded: RecordedHistory,
    *,
    since_ms: int,
    limit: int,
    kinds: Collection[str] = (),
    ledger_id: int | None = None,
    bookie: str | None = None,
) -> HistoryRecord:
    """Return the last ``limit`` events that pass the filters. An empty filter passes everything."""
    found = [
        noted
        for noted in recorded.events
        if noted.event.last_ms >= since_ms
        and (not kinds or noted.event.kind in kinds)
        and ledger_id in (None, noted.event.ledger_id)
        and (bookie is None or bookie in noted.event.bookies)
    ]
    shown = found[-limit:]
    return HistoryRecord(
        since_ms=since_ms,
        events=[
            EventRecord(node=each.node, text=event_text(each.event), **structs.asdict(each.event))
            for each in shown
        ],
        omitted=len(found) - len(shown),
        unreadable_records=list(recorded.unreadable),
    )


# --- Text -----------------------------------------------------------------------------------------


def time_text(time_ms: int) -> str:
    return datetime.fromtimestamp(time_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def event_text(event: Event) -> str:
    """Return one clause that says what happened, without its time and node."""
    text = _text(event)
    if event.until_ms is not None and event.until_ms - event.at_ms >= 1000:
        text += f", until {_clock_text(event.until_ms, beside_ms=event.at_ms)}"
    return text


def _text(event: Event) -> str:
    """A kind of a later release gets its name, and what this release knows of its fields."""
    bookies = ", ".join(event.bookies)
    match event.kind:
        case Kind.BOOKIE_LOST:
            since = "" if event.since_ms is None else _clock_text(event.since_ms, event.at_ms)
            return f"{bookies} is lost" + (f" (counted as absent since {since})" if since else "")
        case Kind.BOOKIE_REFORMATTED:
            return f"{bookies} was reformatted"
        case Kind.BOOKIE_RETURNED:
            return f"{bookies} is registered again"
        case Kind.LOSS_ENDED:
            return f"{bookies} counts no longer as lost, and is not registered"
        case Kind.LEDGERS_MARKED:
            return f"marked {counted(event.ledger_count, 'ledger')}: {_why(event)}"
        case Kind.LEDGERS_REPAIRED:
            ledgers = counted(event.ledger_count, "ledger") if event.ledger_count else "no ledger"
            entries = counted(event.entry_count, "entry")
            why = f"{_why(event)}; " if event.cause else ""
            return f"completed {ledgers}: {why}copied {entries}, {size_text(event.entry_bytes)}"
        case Kind.LEDGER_FENCED:
            # A fence does not wait until an absent bookie counts as lost.
            why = f": {_why(event, lost='absent')}" if event.cause else ""
            return f"fenced open ledger {event.ledger_id}{why}"
        case Kind.LEDGER_RECOVERED:
            return f"recovered ledger {event.ledger_id}: closed {_end(event.last_entry_id)}"
        case Kind.RECOVERY_UNFINISHED:
            return f"could not close ledger {event.ledger_id}, which may be fenced: {event.reason}"
        case Kind.LEADER_ELECTED:
            return "became leader"
        case Kind.HOLD_BEGAN:
            ends = "" if event.ends_ms is None else f", until {time_text(event.ends_ms)} at most"
            return f"safety hold began{ends}: {event.reason}. Absent: {bookies}"
        case Kind.HOLD_ENDED:
            absent = f". Absent: {bookies}" if bookies else ""
            return f"safety hold ended ({_HOLD_ENDS.get(event.cause, event.cause)}){absent}"
        case Kind.CHECK_FINISHED:
            return (
                f"{event.cause} checked {counted(event.ledger_count, 'ledger')}"
                f"{_by(event)}: {counts_text(event.counts)}"
            )
        case Kind.FINDING:
            where = f" on {bookies}" if bookies else ""
            return f"{event.cause} check found ledger {event.ledger_id}{where}: {event.reason}"
        case Kind.ORDER:
            return _order(event, bookies)
        case Kind.NOT_RECORDED:
            return (
                f"{counted(event.event_count, 'event')} not recorded, because there were too many"
            )
    ledger = "" if event.ledger_id is None else f"ledger {event.ledger_id}"
    facts = ", ".join(filter(None, [ledger, bookies, event.cause, event.reason]))
    return f"{event.kind}{_by(event)}" + (f": {facts}" if facts else "")


_HOLD_ENDS = {
    "returned": "enough bookies are back",
    "time": "its time is over",
    "order": "by order",
}


def _why(event: Event, *, lost: str = Cause.LOST.value) -> str:
    """Return the cause of marks, repairs or a fence. ``lost``: what a lost bookie is called."""
    bookies = ", ".join(event.bookies) or "several bookies"
    are = "is" if len(event.bookies) == 1 else "are"
    match event.cause:
        case Cause.LOST:
            return f"{bookies} {are} {lost}"
        case Cause.REFORMATTED:
            return f"{bookies} {are} {event.cause}"
        case Cause.DRAINED:
            return f"draining {bookies}"
        case Cause.FOUND:
            return f"a check found missing or damaged copies on {bookies}"
        case Cause.RETURNED:
            return f"{bookies} {are} registered again"
        case Cause.CANCELLED:
            return f"the drain of {bookies} was cancelled"
        case Cause.DELETED:
            return "the ledgers were deleted"
    return f"{event.cause} {bookies}"  # of a later release


def _order(event: Event, bookies: str) -> str:
    """Return the command, what it was about, and who ran it."""
    about = [
        bookies,
        "" if event.ledger_id is None else f"ledger {event.ledger_id}",
        counted(event.ledger_count, "ledger") if event.ledger_count else "",
        event.cause,
        _counts(event.counts),
    ]
    text = " ".join(filter(None, [f"bookmender {event.order}", *about])) + _by(event)
    if event.last_entry_id is not None:
        text += f": closed {_end(event.last_entry_id)}"
    if event.ends_ms is not None:
        text += f", until {time_text(event.ends_ms)}"
    return text + (f" ({event.reason})" if event.reason else "")


def _by(event: Event) -> str:
    return f" by {event.by}" if event.by else ""


def _end(last_entry_id: int | None) -> str:
    if last_entry_id is None or last_entry_id < 0:
        return "without entries"
    return f"after entry {last_entry_id}"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in sorted(counts.items()))


def _clock_text(time_ms: int, beside_ms: int) -> str:
    """Return the time, without the date if that is the same as of ``beside_ms``."""
    text, beside = time_text(time_ms), time_text(beside_ms)
    return text.partition(" ")[2] if text[:10] == beside[:10] else text
