"""The page for people: HTML of what one node knows, without I/O.

``sections`` makes the parts that change, and ``document`` puts them into a page. The same parts go
to open pages as events, so a page without JavaScript shows the same as one with it. Sentences and
numbers come from the functions of the command line.

All names and messages of the cluster are foreign text. ``element`` escapes whatever is not
``Html``, shows control characters as escapes, and cuts what is too long.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape

from daemon.messages import message
from daemon.operations.bookies import BookieRow, BookieState
from daemon.operations.checks import CheckRow, Checks
from daemon.operations.history import event_text
from daemon.status.answers import ConditionRecord
from daemon.status.condition import health, some
from daemon.status.conditions import CONDITIONS, conditions
from daemon.status.records import age_s
from daemon.status.report import facts
from daemon.status.state import Status
from daemon.words import counted, duration_text, printable
from ledgers.model import BookieId
from replication.history import NodeEvent, RecordedHistory
from replication.ledger_record import WaitingNote
from replication.reasons import gravity

TEXT_LENGTH_MAX = 2_000
NAME_LENGTH_MAX = 120
"""Longer texts and names are cut, and their length is shown."""
BOOKIES_SHOWN_MAX = 500
UNFOLDED_MAX = 8
"""Writable bookies of a rack that are listed outside a fold."""
LEDGERS_SHOWN_MAX = 20
"""Ledgers listed for one reason."""
NODES_SHOWN_MAX = 200
EVENTS_SHOWN_MAX = 20
POINTS_MAX = 300
"""Points of the line of the queue."""
GAP_MS = 180_000
"""The line of the queue is interrupted where no sample was taken for longer."""
NO_EVENTS = RecordedHistory()
UNKNOWN_RACK = "rack not known"
SECTIONS = {
    "health": "Health",
    "queue": "Queue",
    "blocked": "Blocked and waiting ledgers",
    "bookies": "Bookies",
    "checks": "Checks",
    "fsck": "Last fsck",
    "nodes": "Nodes",
    "history": "History",
}
"""Ids and titles, in the order of the page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The number of queued ledgers at one moment."""

    time_ms: int
    ledger_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """All that the page shows of one moment.

    ``history``: of the last 24 hours. ``racks``: the last known racks. ``samples``: in the order
    of time. ``remaining_s``: until the queue is empty; None: unknown. ``node``: host and pid of
    this node. ``node_problem``: why this node is not ready; None if it is.
    """

    status: Status
    bookies: Sequence[BookieRow] = ()
    racks: Mapping[BookieId, str]
    checks: Checks
    history: RecordedHistory = NO_EVENTS
    samples: Sequence[Sample] = ()
    remaining_s: float | None = None
    node: tuple[str, int]
    node_problem: str | None = None


# --- Markup ---------------------------------------------------------------------------------------


class Html(str):
    """Markup that is safe to send. Any other string is text."""

    __slots__ = ()


def element(tag: str, *children: object, **attributes: object) -> Html:
    """Return an element. Children and attributes that are not ``Html`` are escaped.

    ``class_`` and ``data_count`` become ``class`` and ``data-count``. An attribute that is None or
    False is left out; True is an attribute without a value.
    """
    written = "".join(
        f" {name.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{_safe(value)}"')
        for name, value in attributes.items()
        if value is not None and value is not False
    )
    return Html(f"<{tag}{written}>{joined(children)}</{tag}>")


def joined(children: Iterable[object]) -> Html:
    """Return the children as markup, one after the other."""
    return Html("".join(_safe(child) for child in children))


def _safe(value: object) -> str:
    return value if isinstance(value, Html) else escape(clipped(str(value), TEXT_LENGTH_MAX))


def clipped(text: str, length_max: int = NAME_LENGTH_MAX) -> str:
    """Return the text without control characters. A text that is too long is cut."""
    if len(text) <= length_max:
        return printable(text)
    return f"{printable(text[:length_max])}… ({len(text):,} characters)"


def _lines(lines: Iterable[str]) -> Html:
    items = [element("li", line.strip()) for line in lines]
    return element("ul", *items, class_="plain") if items else Html()


def _time(time_ms: int) -> Html:
    moment = datetime.fromtimestamp(time_ms / 1000, UTC)
    return element("time", moment.strftime("%Y-%m-%d %H:%M:%S UTC"), datetime=moment.isoformat())


def _soft(text: object) -> Html:
    return element("p", text, class_="soft")


# --- The page -------------------------------------------------------------------------------------


def document(parts: Mapping[str, str], *, title: str, cluster: str, node: str, version: str) -> str:
    """Return the page. ``parts``: by section id, markup of ``sections`` and of ``notice``. A
    section without a part says that nothing was read yet."""
    body = [_section(name, parts.get(name)) for name in SECTIONS]
    # Short sections stand one below the other, beside the checks.
    body = [*body[:-3], element("div", *body[-3:-1], class_="column"), body[-1]]
    head = joined(
        (
            Html('<meta charset="utf-8">'),
            Html('<meta name="viewport" content="width=device-width, initial-scale=1">'),
            Html('<meta name="color-scheme" content="light dark">'),
            element("title", title),
            Html('<link rel="icon" href="data:,"><link rel="stylesheet" href="page.css">'),
            Html('<script src="page.js" defer></script>'),
            Html('<noscript><meta http-equiv="refresh" content="10"></noscript>'),
        )
    )
    top = element(
        "header",
        element("a", "Skip to the health", href="#health-title", class_="skip"),
        element("h1", "bookmender ", element("span", cluster, class_="soft")),
        element("p", "Not live.", id="connection", class_="soft"),
        element("div", Html(parts.get("notice", "")), id="notice"),
        element("p", id="spoken", role="status", class_="unseen"),
    )
    links = [
        element("a", path, href=path)
        for path in ("api/v1/status", "api/v1/openapi.json", "metrics", "readyz")
    ]
    bottom = element(
        "footer", _soft(f"bookmender {version} on {node}"), element("nav", *links, aria_label="API")
    )
    return (
        '<!doctype html>\n<html lang="en"><head>'
        f"{head}</head>\n<body>{top}\n{element('main', *body)}\n{bottom}</body></html>\n"
    )


def _section(name: str, part: str | None) -> Html:
    return element(
        "section",
        element("h2", SECTIONS[name], id=f"{name}-title"),
        element("div", _soft("Not read yet.") if part is None else Html(part), id=name),
        aria_labelledby=f"{name}-title",
        class_=f"part {name}",
    )


def notice(*, problem: str | None, taken_ms: int | None) -> Html:
    """Return the moment of the state, and why there is no newer one."""
    state = () if taken_ms is None else ("State of ", _time(taken_ms), ".")
    if problem is None:
        return element("p", *state, class_="soft") if state else _soft("The cluster is being read.")
    sentence = problem if problem.endswith(".") else f"{problem}."
    return element(
        "p", "The cluster cannot be read: ", sentence, " ", *state, class_="alert", role="alert"
    )


def title_of(status: Status) -> str:
    return f"{health(conditions(status))}, {counted(status.queue.total, 'ledger')} queued"


def sections(view: View) -> dict[str, Html]:
    """Return the sections by id."""
    lines = facts(view.status)
    return {
        "health": _health(conditions(view.status)),
        "queue": _queue(view, lines["queue"]),
        "blocked": _blocked(view.status),
        "bookies": _bookies(
            view, [*lines["bookies"][1:], *lines["orders"][len(view.status.bookies.ordered) :]]
        ),
        "checks": _checks(view.checks, lines["audit"], now_ms=view.status.taken_ms),
        "fsck": _lines(lines["fsck"]) or _soft("No run yet. Start one: bookmender fsck run"),
        "nodes": _nodes(view, leader=lines["leader"], ledger_map=lines["map"]),
        "history": _history(view.history),
    }


def _card(name: str, count: int, text: str, css: str = "") -> Html:
    """Return a number with its unit. Programs read it by ``name``."""
    shown = element("b", f"{count:,}")
    css = f"card {css if count else 'none'}".rstrip()
    return element("li", shown, " ", text, id=f"count-{name}", data_count=count, class_=css)


def _cards(*cards: Html) -> Html:
    return element("ul", *cards, class_="cards")


# --- Health ---------------------------------------------------------------------------------------


def _health(found: Sequence[ConditionRecord]) -> Html:
    word = health(found)
    head = element("p", word, id="word", data_health=word, class_=f"word {_css(word)}")
    if not found:
        return joined((head, element("p", "Nothing is wrong, as far as the nodes know.")))
    return joined((head, element("ul", *map(_condition, found), class_="conditions")))


def _condition(each: ConditionRecord) -> Html:
    more = CONDITIONS[each.code]
    explained = element(
        "details",
        element("summary", "What it means"),
        element("p", more.meaning),
        element("p", element("b", "Causes: "), more.causes),
        element("p", element("b", "Clears: "), more.clears),
        data_key=f"code-{each.code}",
    )
    severity = each.severity
    return element(
        "li",
        element("p", _tag(severity), " ", element("code", each.code)),
        element("p", element("b", each.fact)),
        element("p", each.action),
        explained,
        class_=_css(severity),
        data_code=each.code,
    )


def _tag(word: str) -> Html:
    return element("span", word, class_=f"tag {_css(word)}")


def _css(word: str) -> str:
    """Return the class that colours a severity or a health."""
    return {"ERROR": "error", "WARN": "warn", "OK": "ok"}.get(word, "quiet")


# --- Queue ----------------------------------------------------------------------------------------


def _queue(view: View, lines: Sequence[str]) -> Html:
    queue = view.status.queue
    cards = _cards(
        _card("queued", queue.total, "queued", "warn"),
        _card("locked", queue.locked_count, "locked for repair", "ok"),
        _card("waiting", queue.waiting_count, "waiting", "warn"),
        _card("blocked", len(queue.blocked), "blocked", "error"),
    )
    return joined(
        (cards, _remaining(view), _burn_down(view.samples, view.status.taken_ms), _lines(lines[1:]))
    )


def _remaining(view: View) -> Html:
    queue = view.status.queue
    if not queue.total:
        text = "No ledger is queued."
    elif view.remaining_s is not None:
        text = f"{counted(queue.total, 'ledger')} left, {duration_text(view.remaining_s)} to go"
    elif queue.waiting_count >= queue.total:
        text = "All queued ledgers wait, so the time left is not known."
    else:
        text = "The time left is not known yet: the queue has not become shorter."
    return element("p", element("b", text), id="remaining")


def _burn_down(samples: Sequence[Sample], now_ms: int) -> Html:
    """Return the length of the queue over time; nothing if it was empty all the time."""
    most = max((each.ledger_count for each in samples), default=0)
    if len(samples) < 2 or not most:
        return Html()
    first_ms = samples[0].time_ms
    span_ms = max(1, now_ms - first_ms, samples[-1].time_ms - first_ms)
    step = len(samples) // POINTS_MAX + 1
    points, before_ms = [], None
    for each in (*samples[:-1:step], samples[-1]):
        is_gap = before_ms is None or each.time_ms - before_ms > GAP_MS
        x, y = 600 * (each.time_ms - first_ms) / span_ms, 100 - 96 * each.ledger_count / most
        points.append(f"{'M' if is_gap else 'L'}{x:.1f} {y:.1f}")
        before_ms = each.time_ms
    since = duration_text(span_ms / 1000)
    label = f"{samples[0].ledger_count:,} ledgers queued {since} ago, at most {most:,}, now "
    line = element("path", d=Html("".join(points)), class_="line")
    base = element("path", d="M0 100H600", class_="base")
    drawing = element(
        "svg",
        base,
        line,
        viewBox="0 0 600 102",
        preserveAspectRatio="none",
        role="img",
        aria_label=f"{label}{samples[-1].ledger_count:,}",
    )
    axis = element("span", element("span", f"{since} ago"), element("span", "now"), class_="axis")
    caption = element("figcaption", _soft(f"Queued ledgers; the top is {most:,}"), axis)
    return element("figure", drawing, caption)


# --- Blocked ledgers ------------------------------------------------------------------------------


def _blocked(status: Status) -> Html:
    """Return why ledgers wait, the reasons that need an operator first."""
    by_reason: dict[str, list[WaitingNote]] = defaultdict(list)
    for note in sorted(status.queue.valid_notes, key=lambda note: gravity(note.reason)):
        by_reason[note.reason.value].append(note)
    due: tuple[Html, ...] = ()
    if overtaken := status.queue.overtaken:
        due = (_soft(f"{len(overtaken):,} will be tried again now: {some(sorted(overtaken))}"),)
    if not by_reason:
        return joined(due) or _soft("No ledger is blocked or waits.")
    groups = [_reason(name, notes, status.taken_ms) for name, notes in by_reason.items()]
    return joined((*due, element("ul", *groups, class_="reasons")))


def _reason(name: str, notes: Sequence[WaitingNote], now_ms: int) -> Html:
    longest = duration_text(max(age_s(note.since_ms, now_ms) for note in notes))
    word, css = ("blocked", "error") if notes[0].reason.needs_help else ("waiting", "quiet")
    ledgers = [_note(note, now_ms) for note in notes[:LEDGERS_SHOWN_MAX]]
    more = len(notes) - len(ledgers)
    return element(
        "li",
        element(
            "p",
            element("span", word, class_=f"tag {css}"),
            " ",
            element("b", f"{len(notes):,} {name}"),
            f", for up to {longest}",
        ),
        element("p", message(notes[0].ledger_id, notes[0].blocked).text),
        element(
            "details",
            element("summary", f"Ledgers: {some([note.ledger_id for note in notes])}"),
            element("ul", *ledgers),
            _soft(f"{more:,} more: bookmender queue") if more > 0 else "",
            data_key=f"reason-{name}",
        ),
        class_=css,
        data_reason=name,
        data_count=len(notes),
    )


def _note(note: WaitingNote, now_ms: int) -> Html:
    first = duration_text(age_s(note.since_ms, now_ms))
    tries = f"{counted(note.tries, 'try')}, the first {first} ago, the last by {clipped(note.node)}"
    return element(
        "li",
        element("b", f"ledger {note.ledger_id}"),
        f": {message(note.ledger_id, note.blocked).text} ",
        element("span", f"({tries})", class_="soft"),
    )


# --- Bookies --------------------------------------------------------------------------------------


def _bookies(view: View, lines: Sequence[str]) -> Html:
    """Return the bookies by rack. ``lines``: lost and absent bookies, and unreadable orders."""
    bookies = view.status.bookies
    counts = [
        _card("writable", len(bookies.writable), "writable", "ok"),
        _card("read-only", len(bookies.read_only), "read-only", "warn"),
        _card("lost", len(bookies.lost), "lost", "error"),
        _card("absent", len(bookies.absent), "absent", "warn"),
        _card("in-maintenance", len(bookies.in_maintenance), "absent for maintenance"),
        _card("reformatted", len(bookies.reformatted), "reformatted", "error"),
    ]
    racks: dict[str, list[BookieRow]] = defaultdict(list)
    rows = sorted(view.bookies, key=lambda row: (_is_plain(row, view), row.bookie))
    for row in rows[:BOOKIES_SHOWN_MAX]:
        racks[view.racks.get(row.bookie, UNKNOWN_RACK)].append(row)
    more = len(rows) - BOOKIES_SHOWN_MAX
    rest = [_soft(f"{more:,} more: bookmender bookie list")] if more > 0 else []
    groups = [
        _rack(name, racks[name], view)
        for name in sorted(racks, key=lambda name: (name == UNKNOWN_RACK, name))
    ]
    return joined((_cards(*counts), _lines(lines), element("div", *groups, class_="racks"), *rest))


def _is_plain(row: BookieRow, view: View) -> bool:
    """Return True if there is nothing to say about the bookie."""
    return (
        row.state is BookieState.WRITABLE
        and row.drain is None
        and row.maintenance is None
        and row.bookie not in view.status.bookies.reformatted
    )


def _rack(name: str, rows: Sequence[BookieRow], view: View) -> Html:
    plain = [row for row in rows if _is_plain(row, view)]
    items = [_bookie(row, view) for row in rows]
    listed: list[Html] = [element("ul", *items, class_="list")]
    if len(plain) > UNFOLDED_MAX:
        cut = len(rows) - len(plain)  # the plain ones are the last
        listed = [
            element("ul", *items[:cut], class_="list") if cut else Html(),
            element(
                "details",
                element("summary", f"{counted(len(plain), 'bookie')} writable"),
                element("ul", *items[cut:], class_="list"),
                data_key=f"rack-{clipped(name)}",
            ),
        ]
    title = element(
        "h3", clipped(name), " ", element("span", counted(len(rows), "bookie"), class_="soft")
    )
    return element("div", title, *listed, class_="rack")


def _bookie(row: BookieRow, view: View) -> Html:
    told = row.to_text(now_ms=view.status.taken_ms).removeprefix(f"{row.bookie}: ")
    if row.bookie in view.status.bookies.reformatted:
        told += ", reformatted"
    css = "ok" if row.state is BookieState.WRITABLE else "warn"
    if row.state is BookieState.LOST or row.bookie in view.status.bookies.reformatted:
        css = "error"
    return element(
        "li",
        element("code", clipped(row.bookie)),
        " ",
        element("span", told, class_=f"state {css}"),
        data_state=row.state.value,
    )


# --- Checks, nodes --------------------------------------------------------------------------------


def _checks(checks: Checks, audit: Sequence[str], *, now_ms: int) -> Html:
    concerns = [element("p", each, class_="concern") for each in checks.concerns]
    last = [_soft(f"Last audit of the bookies: {line}") for line in audit]
    rows = [item for row in checks.rows for item in _check(row, now_ms)]
    return joined((*concerns, *last, element("dl", *rows)))


def _check(row: CheckRow, now_ms: int) -> Iterator[Html]:
    lines = row.to_text(now_ms=now_ms).removeprefix(f"{row.name}: ").splitlines()
    yield element("dt", row.name, title=row.about)
    yield element("dd", *(element("p", line.strip()) for line in lines))


def _nodes(view: View, *, leader: Sequence[str], ledger_map: Sequence[str]) -> Html:
    services, now_ms = view.status.services, view.status.taken_ms
    processes: dict[tuple[str, int], list[str]] = defaultdict(list)
    started_ms: dict[tuple[str, int], int] = {}
    for node in services.nodes:
        key = node.host, node.pid
        leads = services.leader_node == node
        processes[key].append(f"{node.role.value} (leads)" if leads else node.role.value)
        started_ms[key] = min(node.started_ms, started_ms.get(key, node.started_ms))
    rows = [
        element(
            "tr",
            element(
                "th",
                clipped(host),
                element("span", " this node", class_="soft") if (host, pid) == view.node else "",
                scope="row",
            ),
            element("td", pid),
            element("td", ", ".join(dict.fromkeys(processes[host, pid]))),
            element("td", duration_text(age_s(started_ms[host, pid], now_ms)), class_="number"),
        )
        for host, pid in [*processes][:NODES_SHOWN_MAX]
    ]
    heads = (("host", None), ("pid", None), ("roles", None), ("runs for", "number"))
    head = element("tr", *(element("th", name, scope="col", class_=css) for name, css in heads))
    more = len(processes) - NODES_SHOWN_MAX
    problem = view.node_problem
    return joined(
        (
            element("p", "Leader: ", element("b", *leader), id="leader"),
            *(_soft(f"Ledger map: {line}") for line in ledger_map),
            element("p", f"This node is not ready: {problem}", class_="alert") if problem else "",
            element(
                "div",
                element("table", element("thead", head), element("tbody", *rows)),
                class_="scroll",
            )
            if rows
            else "",
            _soft(f"{more:,} more") if more > 0 else "",
        )
    )


# --- History --------------------------------------------------------------------------------------


def _history(recorded: RecordedHistory) -> Html:
    """Return the last events, the newest first."""
    shown = recorded.events[-EVENTS_SHOWN_MAX:][::-1]
    more = len(recorded.events) - len(shown)
    unreadable = [clipped(path) for path in recorded.unreadable]
    return joined(
        (
            element("div", element("table", element("tbody", *map(_event, shown))), class_="scroll")
            if shown
            else _soft("Nothing was recorded in the last 24 hours."),
            _soft(f"{counted(more, 'earlier event')} of the last 24 hours: bookmender history")
            if more > 0
            else "",
            _soft(f"Events may be missing. Unreadable: {some(unreadable)}") if unreadable else "",
        )
    )


def _event(noted: NodeEvent) -> Html:
    return element(
        "tr",
        element("td", _time(noted.event.at_ms), class_="time"),
        element("td", event_text(noted.event)),
        element("td", clipped(noted.node), class_="soft"),
        data_kind=clipped(noted.event.kind),
    )
