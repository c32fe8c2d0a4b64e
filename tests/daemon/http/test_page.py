"""The page for people: every state becomes HTML, and foreign text stays text."""

import re
import subprocess
import sys
import unicodedata
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from daemon.http import page
from daemon.http.page import SECTIONS, Html, Sample, View, clipped, element
from daemon.operations.bookies import BookieRow, BookieState
from daemon.operations.checks import CheckRow, Checks
from daemon.status.conditions import conditions
from daemon.status.report import facts
from daemon.status.state import Status
from ledgers.model import BookieId
from replication.history import Event, Kind, NodeEvent, RecordedHistory
from replication.nodes import Role
from replication.orders import MaintenanceWindow
from replication.reasons import Blocked, Facts, Reason
from tests.daemon.status_values import HEALTHY, as_json, changed, node, note
from tests.replication.ledger_values import B1, B2, B3

ROOT = Path(__file__).parents[3]
EVIL = "</code><script>alert('1')</script>\x00\x1b[2J\u202e&\"' onclick=x"
LONG = "b" * 10_000
VOID = {"meta", "link"}
TAGS = set(
    re.findall(
        r"\w+",
        "a b body code dd details div dl dt figcaption figure footer h1 h2 h3 head header html li "
        "link main meta nav noscript p path script section span summary svg table tbody td th "
        "thead time title tr ul",
    )
)
NO_CHECKS = Checks(rows=(), leader=None, is_paused=False, concerns=())


class Parsed(HTMLParser):
    """A page as a browser reads it. ``counts``: numbers by element id."""

    def __init__(self, markup: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.ids: list[str] = []
        self.counts: dict[str, int] = {}
        self.text = ""
        self.feed(markup)
        self.close()
        assert self.open == [], "every element ends"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags.add(tag)
        self.attributes |= given.keys()
        if name := given.get("id"):
            self.ids.append(name)
            if count := given.get("data-count"):
                self.counts[name] = int(count)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def view(status: Status, **changes: Any) -> View:
    given = View(status=status, racks={}, checks=NO_CHECKS, node=("host-a", 1))
    return replace(given, **changes)


def rendered(shown: View) -> Parsed:
    """Return the page of this moment. It must be well-formed and have no other markup than ours."""
    parts = {**page.sections(shown), "notice": page.notice(problem=None, taken_ms=0)}
    markup = page.document(parts, title="t", cluster="zk://c", node="host-a", version="1")
    parsed = Parsed(markup)
    assert parsed.tags <= TAGS, parsed.tags - TAGS
    assert not [name for name in parsed.attributes if name.startswith("on") or name == "style"]
    assert markup.count("<script") == 1
    assert len(parsed.ids) == len(set(parsed.ids))
    assert not [c for c in parsed.text if unicodedata.category(c) in ("Cc", "Cf") and c != "\n"]
    return parsed


def row(bookie: str, state: BookieState = BookieState.WRITABLE, **changes: Any) -> BookieRow:
    return BookieRow(bookie=BookieId(bookie), state=state, has_cookie=True, **changes)


BUSY = changed(
    HEALTHY,
    taken_ms=10_000,
    lost=(B1,),
    absent=(B2,),
    marked_count=7,
    private_count=2,
    locked_count=3,
    by_missing=((2, 1), (1, 6)),
    by_bookie=((B1, 7),),
    waiting=(note(1, Reason.NO_COPY), note(2, Reason.NO_COPY), note(3, Reason.OPEN_LEDGER_GRACE)),
    waiting_count=3,
    nodes=(node("host-a", 1, Role.AUDITOR), node("host-a", 1, Role.WORKER)),
    leader="host-a",
    leader_node=node("host-a", 1, Role.AUDITOR),
)


@pytest.mark.parametrize(
    "status",
    [
        pytest.param(Status(), id="nothing is known"),
        pytest.param(HEALTHY, id="healthy"),
        pytest.param(changed(HEALTHY, leader=None), id="nobody leads"),
        pytest.param(changed(HEALTHY, is_disabled=True, unreadable=("/orders/x",)), id="disabled"),
        pytest.param(BUSY, id="busy"),
    ],
)
def test_a_state_is_shown_with_the_sentences_of_the_command(status: Status) -> None:
    parsed = rendered(view(status))

    for each in conditions(status):
        assert each.fact in parsed.text
        assert each.action in parsed.text
        assert each.code in parsed.text
    told = facts(status)
    for line in (*told["queue"][1:], *told["bookies"][1:], *told["leader"], *told["fsck"]):
        assert line.strip() in parsed.text
    assert set(SECTIONS) <= set(parsed.ids)


def test_the_numbers_are_those_of_the_json() -> None:
    counts = rendered(view(BUSY)).counts

    expected = as_json(BUSY)
    assert counts["count-queued"] == expected["queue"]["total"] == 9
    assert counts["count-locked"] == expected["queue"]["locked"] == 3
    assert counts["count-waiting"] == expected["waiting"]["count"] == 3
    assert counts["count-blocked"] == 2
    for state in ("writable", "read_only", "lost", "absent", "reformatted"):
        assert counts[f"count-{state.replace('_', '-')}"] == len(expected["bookies"][state])


def test_blocked_ledgers_come_first_with_why() -> None:
    text = rendered(view(BUSY)).text

    assert text.index("blocked 2 no-copy") < text.index("waiting 1 open-ledger-grace")
    assert "Ledgers: 1, 2" in text


@pytest.mark.parametrize("name", [EVIL, LONG, EVIL + LONG], ids=["evil", "long", "both"])
def test_foreign_text_stays_text(name: str) -> None:
    bookie = BookieId(name)
    blocked = Blocked(reason=Reason.NO_COPY, facts=Facts(absent=(bookie,), errors=(name,)))
    status = changed(
        BUSY,
        lost=(bookie,),
        reformatted=(bookie,),
        unreadable=(name,),
        by_bookie=((name, 7),),
        waiting=(replace(note(1, Reason.NO_COPY), blocked=blocked, node=name),),
        leader=name,
        leader_node=None,
        nodes=(replace(node(name, 1, Role.WORKER), bookie_id=bookie),),
    )
    window = MaintenanceWindow(since_ms=0, until_ms=20_000, reason=name)
    checks = Checks(
        rows=(CheckRow(name="bookies", about=name, interval_s=1),),
        leader=name,
        is_paused=False,
        concerns=(name,),
    )

    shown = view(
        status,
        bookies=[row(name, BookieState.LOST), row(name, maintenance=window)],
        racks={bookie: name},
        checks=checks,
        history=RecordedHistory(
            events=(
                NodeEvent(node=name, event=Event(kind=name, bookies=(bookie,), reason=name)),
                NodeEvent(node=name, event=Event(kind=Kind.ORDER, order=name, by=name)),
            ),
            unreadable=(name,),
        ),
        node_problem=name,
    )

    parsed = rendered(shown)
    assert clipped(name) in parsed.text
    assert len(parsed.text) < 40_000
    problem = page.notice(problem=name, taken_ms=1)
    assert Parsed(problem).tags == {"p", "time"}


def test_the_last_events_are_shown_with_time_sentence_and_node() -> None:
    events = tuple(
        NodeEvent(node="host-b", event=Event(kind=Kind.LEDGER_RECOVERED, at_ms=i, ledger_id=i))
        for i in range(25)
    )
    recorded = RecordedHistory(events=events, unreadable=("/history/x",))

    text = rendered(view(HEALTHY, history=recorded)).text

    newest = text.index("1970-01-01 00:00:00 UTCrecovered ledger 24: closed without entries")
    assert newest < text.index("recovered ledger 5: closed without entrieshost-b")
    assert "recovered ledger 4:" not in text
    assert "5 earlier events of the last 24 hours" in text
    assert "Events may be missing. Unreadable: /history/x" in text
    assert "Nothing was recorded" in rendered(view(HEALTHY)).text


def test_a_cut_text_says_how_long_it_is() -> None:
    assert clipped("a" * 120) == "a" * 120
    assert clipped("a" * 10_000) == "a" * 120 + "… (10,000 characters)"
    assert clipped("a\n\x00\u202e") == r"a\n\x00\u202e"


def test_only_markup_of_ours_is_not_escaped() -> None:
    made = element("b", "<i>", Html("<i>1</i>"), title='"', data_x=None, hidden=True)

    assert made == '<b title="&quot;" hidden>&lt;i&gt;<i>1</i></b>'


def test_bookies_stand_by_rack_with_the_healthy_ones_folded() -> None:
    rows = [row(f"10.0.0.{number}:3181") for number in range(20)]
    rows.append(row("10.0.0.99:3181", BookieState.LOST))
    racks = {each.bookie: "/rack-a" for each in rows[5:]}

    text = rendered(view(HEALTHY, bookies=rows, racks=racks)).text

    assert "/rack-a 16 bookies10.0.0.99:3181 lost15 bookies writable" in text
    assert text.index("/rack-a 16 bookies") < text.index("rack not known 5 bookies")


def test_a_large_cluster_is_cut() -> None:
    rows = [row(f"10.0.{number // 250}.{number % 250}:3181") for number in range(5_000)]

    text = rendered(view(HEALTHY, bookies=rows)).text

    assert "4,500 more: bookmender bookie list" in text
    assert len(text) < 40_000


@pytest.mark.parametrize(
    ("remaining_s", "waiting_count", "text"),
    [
        (90.0, 0, "9 ledgers left, 1 min 30 s to go"),
        (None, 9, "All queued ledgers wait, so the time left is not known."),
        (None, 0, "The time left is not known yet: the queue has not become shorter."),
    ],
)
def test_the_time_that_is_left(remaining_s: float | None, waiting_count: int, text: str) -> None:
    status = changed(BUSY, waiting_count=waiting_count)

    assert text in rendered(view(status, remaining_s=remaining_s)).text


def drawn(samples: Sequence[tuple[int, int]]) -> str:
    shown = [Sample(time_ms=time_ms, ledger_count=count) for time_ms, count in samples]
    return page.sections(view(changed(BUSY, taken_ms=600_000), samples=shown))["queue"]


def test_the_queue_is_drawn_over_time() -> None:
    markup = drawn([(0, 100), (150_000, 50), (300_000, 0)])

    assert 'd="M0.0 4.0L150.0 52.0L300.0 100.0"' in markup
    assert "100 ledgers queued 10 min ago, at most 100, now 0" in markup
    assert "the top is 100" in markup


def test_a_long_line_has_few_points_and_ends_with_the_newest() -> None:
    markup = drawn([(2_000 * number, 3_600 - number) for number in range(3_600)])

    assert markup.count("L") < 320
    assert 'L600.0 100.0" class="line"' in markup


def test_the_line_has_a_gap_where_nothing_was_measured() -> None:
    assert drawn([(0, 100), (300_000, 0)]).count("M") == 3  # with the base line


@pytest.mark.parametrize("samples", [[], [(0, 5)], [(0, 0), (5_000, 0)]])
def test_an_empty_queue_is_not_drawn(samples: list[tuple[int, int]]) -> None:
    assert "<svg" not in drawn(samples)


def test_headings_go_down_by_one() -> None:
    markup = "".join(page.sections(view(BUSY, bookies=[row(B3)])).values())
    levels = [int(level) for level in re.findall(r"<h(\d)", markup)]

    assert all(after <= before + 1 for before, after in pairwise([2, *levels]))


# --- Files ----------------------------------------------------------------------------------------


def luminance(colour: str) -> float:
    """By WCAG 2.1."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize("name", ["ink", "soft", "error", "warn", "ok", "quiet", "link"])
@pytest.mark.parametrize("paper", ["paper", "card"])
def test_the_contrast_of_text_is_that_of_wcag_aa(scheme: int, name: str, paper: str) -> None:
    style = files("daemon.http").joinpath("page.css").read_text()
    palette = re.findall(r":root \{(.*?)\}", style, flags=re.DOTALL)[scheme]
    colours = dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", palette))

    lights = sorted((luminance(colours[name]), luminance(colours[paper])))

    assert (lights[1] + 0.05) / (lights[0] + 0.05) >= 4.5


def test_the_files_name_no_other_host() -> None:
    for name in ("page.css", "page.js"):
        text = files("daemon.http").joinpath(name).read_text()
        assert not re.search(r"https?:|url\(|@import|import\(|eval\(", text)


def test_the_wheel_has_the_files_of_the_page(tmp_path: Path) -> None:
    listed = subprocess.run(
        ["git", "-c", "safe.directory=*", "ls-files", "-z", "daemon", "ledgers"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in (*listed.stdout.split("\0")[:-1], "pyproject.toml", "README.md", "LICENSE"):
        copy = tmp_path / "source" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes((ROOT / name).read_bytes())
    build = "import sys, setuptools.build_meta as b; print(b.build_wheel(sys.argv[1]))"

    built = subprocess.run(
        [sys.executable, "-c", build, str(tmp_path)],
        cwd=tmp_path / "source",
        capture_output=True,
        text=True,
        check=True,
    )

    wheel = tmp_path / built.stdout.splitlines()[-1]
    packed = set(zipfile.ZipFile(wheel).namelist())
    assert {"daemon/http/page.css", "daemon/http/page.js", "daemon/http/page.py"} <= packed
