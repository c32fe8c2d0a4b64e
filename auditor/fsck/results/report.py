"""``report.html``: one self-contained page for people. Pure, except ``write_report``.

Programs may read it too: each count has an element such as ``id="verdict-lost"`` with the number in
``data-count``. Everything from the cluster is escaped, bookie ids included. The page loads nothing
from the network, follows the reader's light or dark mode, and is readable on a phone.

The figures are counted column by column, so that a million ledgers fit in memory.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from html import escape
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from auditor.fsck.results.files import replace_file
from auditor.fsck.results.finished_runs import Results
from auditor.fsck.results.summary import Advice, ReportTexts, Summary
from auditor.fsck.verdicts import Evidence, Finding, Grade, LedgerVerdict
from ledgers.model import BookieId
from ledgers.sizes import size_text

REPORT_FILE = "report.html"
PLACES_MAX = 50
UNFOLDED_MAX = 20
"""Number of ledgers listed before a fold, so that the sections below are easy to find."""
EVIDENCE_MAX = 20
"""Number of observations shown for one ledger."""
GRADE_TEXTS: Mapping[Grade, str] = {
    Grade.LOST: "no good copy is left",
    Grade.AT_RISK: "one copy is left",
    Grade.DEGRADED: "fewer good copies than the write quorum",
    Grade.UNKNOWN: "some copies did not answer",
    Grade.WHOLE: "all copies are good",
}
WORST_MAX = 200
"""Number of ledgers that are shown one by one."""
UNKNOWN_RACK = "rack not known"
HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
AGES = (
    (0, "up to an hour"),
    (HOUR_MS, "up to a day"),
    (DAY_MS, "up to a week"),
    (7 * DAY_MS, "up to a month"),
    (30 * DAY_MS, "up to a year"),
    (365 * DAY_MS, "more than a year"),
)
"""The age since the last write of the metadata: the lower bound in milliseconds, and a name."""


def write_report(results: Results, racks: Mapping[BookieId, str], texts: ReportTexts) -> Path:
    """Write the page beside the results, and return its path."""
    path = results.folder / REPORT_FILE
    figures = figures_of(results, racks)
    replace_file(path, report_page(results.summary, figures, texts, str(results.path)))
    return path


def report_page(summary: Summary, figures: Figures, texts: ReportTexts, path: str) -> str:
    """Return the page. ``path``: of the run's Parquet files, for all further details."""
    body = [
        _head(summary, texts.headline),
        _counts(summary, texts.tails),
        _next_steps(texts.advice),
        _worst(figures),
        _places("bookies", "By bookie", figures.bookies, has_rack=True),
        _places("racks", "By rack", figures.racks, has_rack=False),
        _ages(figures.ages),
        _rest(path, summary),
    ]
    title = f"fsck {summary.run}"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'\">\n"
        f"<title>{escape(title)}</title>\n<style>\n{STYLE}\n</style>\n</head>\n<body>\n"
        + "\n".join(part for part in body if part)
        + "\n</body>\n</html>\n"
    )


# --- The summary ----------------------------------------------------------------------------------


def _head(summary: Summary, headline: str) -> str:
    took_s = max(0, summary.finished_ms - summary.started_ms) // 1000
    only = ", changed ledgers only" if summary.is_changed_only else ""
    facts = [
        f"level {summary.level.value}{only}",
        f"ended {_time(summary.finished_ms)}",
        f"took {took_s:,} s",
        f"{summary.counts.entries_read:,} entries and {size_text(summary.counts.bytes_read)} read",
    ]
    for count, what in (
        (summary.skipped, "skipped: checked recently and unchanged"),
        (summary.left, "not checked: the time was up"),
        (summary.gone, "deleted during the run"),
    ):
        if count:
            facts.append(f"{count:,} ledgers {what}")
    return (
        f'<header>\n<h1 id="headline">{escape(headline)}</h1>\n'
        f'<p class="soft">fsck, run <span id="run">{escape(summary.run)}</span>: '
        f"{escape('; '.join(facts))}.</p>\n</header>"
    )


def _counts(summary: Summary, tails: str) -> str:
    cards = [_card("ledgers", "ledgers", "checked", summary.counts.ledgers)]
    for grade in Grade:
        count = summary.counts.verdicts.get(grade.value, 0)
        cards.append(
            _card(f"verdict-{grade.value}", _words(grade.value), GRADE_TEXTS[grade], count, grade)
        )
    shares = [(grade.value, summary.counts.verdicts.get(grade.value, 0)) for grade in Grade]
    findings = "".join(
        f'<tr><td>{_words(name)}</td><td class="number" id="finding-{escape(name)}" '
        f'data-count="{count}">{count:,}</td></tr>'
        for name, count in summary.counts.findings.items()
        if count
    )
    table = (
        f"<h2>What was found</h2>\n<table>\n<tr><th>finding</th>"
        f'<th class="number">ledgers</th></tr>\n{findings}\n</table>'
    )
    return (
        f'<section id="verdicts">\n<div class="cards">\n{"".join(cards)}\n</div>\n'
        f"{_bar(shares, summary.counts.ledgers, is_tall=True)}\n{table if findings else ''}"
        f"{_tails(summary, tails)}</section>"
    )


def _tails(summary: Summary, text: str) -> str:
    if not text:
        return ""
    count = summary.counts.tails_unseen
    sentence = escape(f"{text[0].upper()}{text[1:]}.")
    return f'<p class="soft" id="tails-unseen" data-count="{count}">{sentence}</p>\n'


def _card(name: str, title: str, text: str, count: int, grade: Grade | None = None) -> str:
    css = " ".join(["card", *([grade.value] if grade else []), *([] if count else ["none"])])
    return (
        f'<div class="{css}" id="{name}" data-count="{count}"><b>{count:,}</b>'
        f'{title}<br><span class="soft">{text}</span></div>\n'
    )


def _next_steps(advice: Sequence[Advice]) -> str:
    steps = "".join(
        f"<li><b>{escape(each.title)}.</b> {escape(each.text)}</li>\n" for each in advice
    )
    if not steps:
        return '<section id="next"><h2>What to do next</h2>\n<p>Nothing.</p></section>'
    return f'<section id="next"><h2>What to do next</h2>\n<ol>\n{steps}</ol></section>'


# --- Ledger by ledger -----------------------------------------------------------------------------


def _worst(figures: Figures) -> str:
    if not figures.worst:
        return ""
    rows = "".join(_ledger(verdict) for verdict in figures.worst[:UNFOLDED_MAX])
    if others := figures.worst[UNFOLDED_MAX:]:
        folded = "".join(_ledger(verdict) for verdict in others)
        rows += f"<details><summary>the next {len(others):,}</summary>\n{folded}</details>\n"
    more = figures.listed_count - len(figures.worst)
    rest = f'<p class="soft">{more:,} more: see <a href="#rest">below</a>.</p>' if more else ""
    return f'<section id="worst"><h2>Ledgers, the most urgent first</h2>\n{rows}{rest}</section>'


def _ledger(verdict: LedgerVerdict) -> str:
    findings = ", ".join(_words(finding.value) for finding in verdict.findings)
    facts = [verdict.state or "metadata unreadable", size_text(verdict.length)]
    if verdict.last_entry_id >= 0:
        facts.append(f"last entry {verdict.last_entry_id:,}")
    if verdict.rests_on_unknown:
        facts.append("some copies unknown")
    shown = verdict.evidence[:EVIDENCE_MAX]
    lines = "".join(_evidence(each) for each in shown)
    left_out = len(verdict.evidence) - len(shown) + verdict.evidence_left_out
    more = f"<p>and {left_out:,} more pieces of evidence.</p>" if left_out else ""
    return (
        f'<details data-ledger="{verdict.ledger_id}" data-verdict="{verdict.grade.value}">'
        f'<summary><span class="tag {verdict.grade.value}">{_words(verdict.grade.value)}</span> '
        f'ledger {verdict.ledger_id} <span class="soft">{escape(findings)}; '
        f"{escape(', '.join(facts))}</span></summary>\n"
        '<div class="scroll"><table>\n<tr><th>finding</th><th>bookie</th><th>entries</th>'
        f'<th class="number">count</th><th>answer</th></tr>\n'
        f"{lines}</table></div>{more}</details>\n"
    )


def _evidence(each: Evidence) -> str:
    entries = ""
    if each.first_entry_id >= 0:
        entries = f"{each.first_entry_id}"
        if each.last_entry_id != each.first_entry_id:
            entries += f" to {each.last_entry_id}"
    answer = ": ".join(part for part in (each.code, each.detail) if part)
    return (
        f"<tr><td>{_words(each.finding.value)}</td>"
        f"<td><code>{escape(each.bookie or '')}</code></td>"
        f'<td>{entries}</td><td class="number">{each.entry_count or ""}</td>'
        f"<td>{escape(answer)}</td></tr>\n"
    )


# --- By place, by age -----------------------------------------------------------------------------


def _places(name: str, title: str, places: Sequence[PlaceFigure], *, has_rack: bool) -> str:
    if not places:
        return ""
    most = max(place.ledgers for place in places)
    rows = "".join(
        f'<tr data-place="{escape(place.name)}"><td><code>{escape(place.name)}</code>'
        + (f' <span class="soft">{escape(place.rack)}</span>' if has_rack and place.rack else "")
        + f'</td><td class="plot">{_bar([("found", place.ledgers)], most)}</td>'
        f'<td class="number">{place.ledgers:,}</td><td>{_by_finding(place.by_finding)}</td></tr>\n'
        for place in places[:PLACES_MAX]
    )
    more = len(places) - PLACES_MAX
    rest = f'<p class="soft">and {more:,} more.</p>' if more > 0 else ""
    return (
        f'<section id="{name}"><h2>{title}</h2>\n<table>\n<tr><th>{title[3:]}</th><th></th>'
        f'<th class="number">ledgers</th><th>findings</th></tr>\n{rows}</table>{rest}</section>'
    )


def _by_finding(counts: Mapping[Finding, int]) -> str:
    return "; ".join(
        f"{_words(finding.value)} {counts[finding]:,}" for finding in Finding if finding in counts
    )


def _ages(ages: Sequence[AgeFigure]) -> str:
    if not ages:
        return ""
    rows = "".join(
        f"<tr><td>{age.name}</td>"
        f'<td class="plot">{_bar(_shares(age), age.ledgers)}</td>'
        f'<td class="number">{age.ledgers:,}</td><td>{_not_whole(age)}</td></tr>\n'
        for age in ages
    )
    return (
        '<section id="ages"><h2>By age</h2>\n<p class="soft">Time since the last write of the '
        "metadata. Each bar shows all ledgers of that age.</p>\n"
        "<table>\n<tr><th>age</th><th></th>"
        f'<th class="number">ledgers</th><th>not whole</th></tr>\n{rows}</table></section>'
    )


def _shares(age: AgeFigure) -> list[tuple[str, int]]:
    return [(grade.value, age.by_grade.get(grade, 0)) for grade in Grade]


def _not_whole(age: AgeFigure) -> str:
    return "; ".join(
        f"{_words(grade.value)} {age.by_grade[grade]:,}"
        for grade in Grade
        if grade is not Grade.WHOLE and age.by_grade.get(grade)
    )


def _bar(shares: Iterable[tuple[str, int]], total: int, *, is_tall: bool = False) -> str:
    """Return a bar of parts side by side, out of ``total``. Each part above 0 is wide enough to be
    visible."""
    shares = [(name, count) for name, count in shares if count]
    label = ", ".join(f"{_words(name)} {count:,}" for name, count in shares)
    rects, start = [], 0.0
    for name, count in shares:
        width = max(0.6, 100 * count / max(1, total))
        rects.append(f'<rect class="{name}" x="{start:.2f}" y="0" width="{width:.2f}" height="1"/>')
        start += width
    extent = max(100.0, start)
    css = ' class="tall"' if is_tall else ""
    return (
        f'<svg{css} viewBox="0 0 {extent:.2f} 1" preserveAspectRatio="none" role="img" '
        f'aria-label="{label}">{"".join(rects)}</svg>'
    )


# --- The rest -------------------------------------------------------------------------------------


def _rest(path: str, summary: Summary) -> str:
    spark = f'spark.read.parquet({json.dumps(path)}).where("is_wrong").orderBy("ledger_id").show()'
    return (
        '<section id="rest"><h2>All results</h2>\n<p>One row for each ledger, with its evidence, '
        "in Parquet files: "
        f"<code>{escape(path)}</code></p>\n<pre>{escape(spark)}</pre>\n"
        f"<p>Exit code of this run: "
        '<span id="exit-code" '
        f'data-count="{summary.exit_code}">{summary.exit_code}</span>.</p></section>'
    )


def _words(name: str) -> str:
    return escape(name.replace("_", " "))


def _time(time_ms: int) -> str:
    return datetime.fromtimestamp(time_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


# --- The figures ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceFigure:
    """A bookie or a rack. ``ledgers``: number of ledgers with a finding there; ``by_finding``
    splits it."""

    name: str
    ledgers: int
    by_finding: Mapping[Finding, int] = field(default_factory=dict)
    rack: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgeFigure:
    """The ledgers of one age."""

    name: str
    by_grade: Mapping[Grade, int]

    @property
    def ledgers(self) -> int:
        return sum(self.by_grade.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The figures of a run. A ledger is listed if it has a finding, or if its grade is not whole.

    ``worst``: the listed ledgers, the worst first, at most ``WORST_MAX``. ``listed_count``: the
    number of all listed ledgers.
    """

    bookies: Sequence[PlaceFigure]
    racks: Sequence[PlaceFigure]
    ages: Sequence[AgeFigure]
    worst: Sequence[LedgerVerdict]
    listed_count: int


def figures_of(results: Results, racks: Mapping[BookieId, str]) -> Figures:
    """Return the figures of a run. ``racks``: the known racks of bookies."""
    listed = results.table(
        ["ledger_id", "verdict", "is_wrong", "length"],
        where=(pc.field("verdict") != Grade.WHOLE.value)
        | (pc.list_value_length(pc.field("reasons")) > 0),
    )
    observed = _observed(results)
    bookies: list[BookieId] = observed["bookie"].unique().to_pylist()
    return Figures(
        bookies=_place_figures(observed, {b: b for b in bookies}, racks),
        racks=_place_figures(observed, {b: racks.get(b, UNKNOWN_RACK) for b in bookies}, {}),
        ages=_age_figures(results),
        worst=_worst_ledgers(results, listed),
        listed_count=listed.num_rows,
    )


def _observed(results: Results) -> pa.Table:
    """Return ledger, bookie and finding, each combination once."""
    rows = results.table(
        ["ledger_id", "evidence"], where=pc.list_value_length(pc.field("evidence")) > 0
    ).combine_chunks()
    ledger_ids, evidence = rows["ledger_id"], rows["evidence"]
    flat = pc.list_flatten(evidence)
    table = pa.table(
        {
            "ledger_id": pc.take(ledger_ids, pc.list_parent_indices(evidence)),
            "bookie": pc.struct_field(flat, "bookie"),
            "finding": pc.struct_field(flat, "finding"),
        }
    )
    named = table.filter(pc.is_valid(table["bookie"]))
    return named.group_by(["ledger_id", "bookie", "finding"]).aggregate([])


def _place_figures(
    observed: pa.Table, place_of: Mapping[str, str], racks: Mapping[BookieId, str]
) -> list[PlaceFigure]:
    """Return the figures of each place, those with most ledgers first."""
    places = pa.array([place_of[bookie] for bookie in observed["bookie"].to_pylist()], pa.string())
    table = observed.set_column(observed.schema.get_field_index("bookie"), "place", places)
    ledgers = _ledger_counts(table, ["place"])
    by_finding: dict[str, dict[Finding, int]] = defaultdict(dict)
    for (place, finding), count in _ledger_counts(table, ["place", "finding"]).items():
        by_finding[place][Finding(finding)] = count
    return sorted(
        (
            PlaceFigure(
                name=place,
                ledgers=count,
                by_finding=by_finding[place],
                rack=racks.get(BookieId(place), ""),
            )
            for (place,), count in ledgers.items()
        ),
        key=lambda figure: (-figure.ledgers, figure.name),
    )


def _ledger_counts(table: pa.Table, keys: list[str]) -> dict[tuple[str, ...], int]:
    """Return the number of different ledgers for each combination of these columns."""
    counted = table.group_by(keys).aggregate([("ledger_id", "count_distinct")])
    columns = [counted[key].to_pylist() for key in keys]
    counts = counted["ledger_id_count_distinct"].to_pylist()
    return dict(zip(zip(*columns, strict=True), counts, strict=True))


def _age_figures(results: Results) -> list[AgeFigure]:
    """Return the ledgers with readable metadata by age, the youngest first."""
    rows = results.table(["verdict", "checked_ms", "mtime_ms"], where=pc.field("mtime_ms") > 0)
    age_ms = pc.subtract(rows["checked_ms"], rows["mtime_ms"])
    steps = [pc.cast(pc.greater(age_ms, since_ms), pa.int32()) for since_ms, _ in AGES[1:]]
    place = steps[0]
    for step in steps[1:]:
        place = pc.add(place, step)
    table = pa.table({"place": place, "verdict": rows["verdict"]})
    counted = table.group_by(["place", "verdict"]).aggregate([([], "count_all")])
    by_place: dict[int, dict[Grade, int]] = defaultdict(dict)
    for row in counted.to_pylist():
        by_place[row["place"]][Grade(row["verdict"])] = row["count_all"]
    return [
        AgeFigure(name=name, by_grade=by_place[number])
        for number, (_, name) in enumerate(AGES)
        if by_place[number]
    ]


def _worst_ledgers(results: Results, listed: pa.Table) -> list[LedgerVerdict]:
    """Return the worst ledgers: wrong ones first, then by grade, then the largest."""
    ranks = pa.array([Grade(value).rank for value in listed["verdict"].to_pylist()], pa.int32())
    order = pc.sort_indices(
        listed.append_column("rank", ranks),
        sort_keys=[
            ("is_wrong", "descending"),
            ("rank", "ascending"),
            ("length", "descending"),
            ("ledger_id", "ascending"),
        ],
    )
    ledger_ids = listed["ledger_id"].take(order[:WORST_MAX]).to_pylist()
    found = {v.ledger_id: v for v in results.verdicts(pc.field("ledger_id").isin(ledger_ids))}
    return [found[ledger_id] for ledger_id in ledger_ids]


# --- The style ------------------------------------------------------------------------------------

STYLE = """
:root {
  color-scheme: light dark;
  --paper: #ffffff; --ink: #1c2126; --soft: #5b6570; --line: #d9dee3; --card: #f5f7f9;
  --lost: #b3123b; --at_risk: #d9480f; --degraded: #b58100; --unknown: #6b7684; --whole: #2b8a3e;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #14181c; --ink: #e6eaee; --soft: #9aa5b1; --line: #313941; --card: #1d2329;
    --lost: #ff6b8b; --at_risk: #ff922b; --degraded: #ffd43b; --unknown: #98a4b0; --whole: #51cf66;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; padding: 1rem; max-width: 64rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere;
}
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 .25rem; }
h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
p { margin: .25rem 0 .75rem; }
.soft { color: var(--soft); }
.cards {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(8.5rem, 1fr)); gap: .5rem;
  margin: 1rem 0; padding: 0;
}
.card {
  background: var(--card); border-left: .3rem solid var(--line); border-radius: .3rem;
  padding: .5rem .75rem;
}
.card b { display: block; font-size: 1.5rem; font-variant-numeric: tabular-nums; }
.none { opacity: .55; }
.lost { --hue: var(--lost); }
.at_risk, .found { --hue: var(--at_risk); }
.degraded { --hue: var(--degraded); }
.unknown { --hue: var(--unknown); }
.whole { --hue: var(--whole); }
.card.lost, .card.at_risk, .card.degraded, .card.unknown, .card.whole {
  border-left-color: var(--hue);
}
rect { fill: var(--hue, var(--line)); }
svg { display: block; width: 100%; height: 1rem; border-radius: .2rem; background: var(--card); }
svg.tall { height: 1.75rem; }
.tag { color: var(--hue); font-weight: 600; }
table { border-collapse: collapse; width: 100%; font-size: .95rem; }
th, td {
  text-align: left; padding: .35rem .5rem .35rem 0; border-bottom: 1px solid var(--line);
  vertical-align: top;
}
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td.plot { width: 35%; vertical-align: middle; }
td > code { display: inline-block; min-width: 9rem; }
.scroll { overflow-x: auto; }
details { border-bottom: 1px solid var(--line); padding: .4rem 0; }
details details { margin-left: 1rem; }
summary { cursor: pointer; }
code, pre { font: .875rem/1.45 ui-monospace, monospace; }
pre { background: var(--card); padding: .75rem; border-radius: .3rem; overflow-x: auto; }
li { margin: .4rem 0; }
@media (max-width: 36rem) { td.plot { width: 28%; } body { font-size: 15px; } }
@media print { details > * { display: block; } body { max-width: none; } }
""".strip()
