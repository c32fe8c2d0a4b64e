"""``report.html``: one self-contained page for people. Pure, except ``write_report``.

Programs may read it too: each count has an element such as ``id="verdict-lost"`` with the number in
``data-count``. Everything from the cluster is escaped, bookie ids included.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path

from auditor.fsck.results.advice import advice_for, headline, tails_text
from auditor.fsck.results.figures import AgeFigure, Figures, PlaceFigure, figures_of
from auditor.fsck.results.reading import Results
from auditor.fsck.results.replacing import replace_file
from auditor.fsck.results.style import STYLE
from auditor.fsck.results.summary import Summary
from auditor.fsck.verdicts import Evidence, Finding, Grade, LedgerVerdict
from ledgers.metadata import BookieId
from ledgers.sizes import size_text

REPORT_FILE = "report.html"
PLACES_MAX = 50
IN_SIGHT = 20
"""Number of ledgers listed before a fold, so that the sections below are easy to find."""
EVIDENCE_MAX = 20
"""Number of observations shown for one ledger."""
GRADE_TEXTS: Mapping[Grade, str] = {
    Grade.LOST: "no good copy is left",
    Grade.AT_RISK: "one copy is left",
    Grade.DEGRADED: "fewer copies than there should be",
    Grade.UNKNOWN: "nobody knows",
    Grade.WHOLE: "all copies are there",
}


def write_report(results: Results, racks: Mapping[BookieId, str]) -> Path:
    """Write the page beside the results, and return its path."""
    path = results.folder / REPORT_FILE
    replace_file(path, report_page(results.summary, figures_of(results, racks), str(results.path)))
    return path


def report_page(summary: Summary, figures: Figures, path: str) -> str:
    """Return the page. ``path``: of the run's Parquet files, for all further details."""
    body = [
        _head(summary),
        _counts(summary),
        _next_steps(summary),
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


def _head(summary: Summary) -> str:
    took_s = max(0, summary.finished_ms - summary.started_ms) // 1000
    facts = [
        f"level {summary.level.value}",
        f"ended {_time(summary.finished_ms)}",
        f"took {took_s:,} s",
        f"{summary.counts.entries_read:,} entries and {size_text(summary.counts.bytes_read)} read",
    ]
    for count, what in (
        (summary.skipped, "skipped, as they were whole lately and have not changed"),
        (summary.left, "left, as the time was up"),
        (summary.gone, "deleted meanwhile"),
    ):
        if count:
            facts.append(f"{count:,} ledgers {what}")
    return (
        f'<header>\n<h1 id="headline">{escape(headline(summary))}</h1>\n'
        f'<p class="soft">fsck, run <span id="run">{escape(summary.run)}</span>: '
        f"{escape('; '.join(facts))}.</p>\n</header>"
    )


def _counts(summary: Summary) -> str:
    cards = [_card("ledgers", "ledgers", "were looked at", summary.counts.ledgers)]
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
        f"{_tails(summary)}</section>"
    )


def _tails(summary: Summary) -> str:
    text = tails_text(summary.counts)
    if not text:
        return ""
    count = summary.counts.tails_unseen
    told = escape(f"{text[0].upper()}{text[1:]}.")
    return f'<p class="soft" id="tails-unseen" data-count="{count}">{told}</p>\n'


def _card(name: str, title: str, text: str, count: int, grade: Grade | None = None) -> str:
    css = " ".join(["card", *([grade.value] if grade else []), *([] if count else ["none"])])
    return (
        f'<div class="{css}" id="{name}" data-count="{count}"><b>{count:,}</b>'
        f'{title}<br><span class="soft">{text}</span></div>\n'
    )


def _next_steps(summary: Summary) -> str:
    steps = "".join(
        f"<li><b>{escape(advice.title)}.</b> {escape(advice.text)}</li>\n"
        for advice in advice_for(summary)
    )
    if not steps:
        return '<section id="next"><h2>What to do next</h2>\n<p>Nothing.</p></section>'
    return f'<section id="next"><h2>What to do next</h2>\n<ol>\n{steps}</ol></section>'


# --- Ledger by ledger -----------------------------------------------------------------------------


def _worst(figures: Figures) -> str:
    if not figures.worst:
        return ""
    rows = "".join(_ledger(verdict) for verdict in figures.worst[:IN_SIGHT])
    if others := figures.worst[IN_SIGHT:]:
        folded = "".join(_ledger(verdict) for verdict in others)
        rows += f"<details><summary>the next {len(others):,}</summary>\n{folded}</details>\n"
    more = figures.told_count - len(figures.worst)
    rest = f'<p class="soft">{more:,} more: see <a href="#rest">below</a>.</p>' if more else ""
    return (
        f'<section id="worst"><h2>Ledgers, the most endangered first</h2>\n{rows}{rest}</section>'
    )


def _ledger(verdict: LedgerVerdict) -> str:
    findings = ", ".join(_words(finding.value) for finding in verdict.findings)
    facts = [verdict.state or "metadata cannot be read", size_text(verdict.length)]
    if verdict.last_entry_id >= 0:
        facts.append(f"last entry {verdict.last_entry_id:,}")
    if verdict.rests_on_unknown:
        facts.append("rests on what is not known")
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
        f'<th class="number">count</th><th>answer</th></tr>\n{lines}</table></div>{more}</details>\n'
    )


def _evidence(each: Evidence) -> str:
    entries = ""
    if each.first_entry_id >= 0:
        entries = f"{each.first_entry_id}"
        if each.last_entry_id != each.first_entry_id:
            entries += f" to {each.last_entry_id}"
    told = ": ".join(part for part in (each.code, each.detail) if part)
    return (
        f"<tr><td>{_words(each.finding.value)}</td><td><code>{escape(each.bookie or '')}</code></td>"
        f'<td>{entries}</td><td class="number">{each.entry_count or ""}</td>'
        f"<td>{escape(told)}</td></tr>\n"
    )


# --- By place, by age -----------------------------------------------------------------------------


def _places(name: str, title: str, places: Sequence[PlaceFigure], *, has_rack: bool) -> str:
    if not places:
        return ""
    most = max(place.ledgers for place in places)
    rows = "".join(
        f'<tr data-place="{escape(place.name)}"><td><code>{escape(place.name)}</code>'
        + (f' <span class="soft">{escape(place.rack)}</span>' if has_rack and place.rack else "")
        + f'</td><td class="plot">{_bar([("told", place.ledgers)], most)}</td>'
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
        '<section id="ages"><h2>By age</h2>\n<p class="soft">Since the metadata was written last; each bar is all '
        "ledgers of that age.</p>\n<table>\n<tr><th>age</th><th></th>"
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
    told = ", ".join(f"{_words(name)} {count:,}" for name, count in shares)
    rects, start = [], 0.0
    for name, count in shares:
        width = max(0.6, 100 * count / max(1, total))
        rects.append(f'<rect class="{name}" x="{start:.2f}" y="0" width="{width:.2f}" height="1"/>')
        start += width
    extent = max(100.0, start)
    css = ' class="tall"' if is_tall else ""
    return (
        f'<svg{css} viewBox="0 0 {extent:.2f} 1" preserveAspectRatio="none" role="img" '
        f'aria-label="{told}">{"".join(rects)}</svg>'
    )


# --- The rest -------------------------------------------------------------------------------------


def _rest(path: str, summary: Summary) -> str:
    spark = f'spark.read.parquet({json.dumps(path)}).where("is_wrong").orderBy("ledger_id").show()'
    return (
        '<section id="rest"><h2>All of it</h2>\n<p>One row a ledger, with all the evidence, in Parquet files: '
        f"<code>{escape(path)}</code></p>\n<pre>{escape(spark)}</pre>\n"
        f"<p>Two runs are compared by <code>bookmender fsck diff</code>; exit code of this one: "
        f'<span id="exit-code" data-count="{summary.exit_code}">{summary.exit_code}</span>.</p></section>'
    )


def _words(name: str) -> str:
    return escape(name.replace("_", " "))


def _time(time_ms: int) -> str:
    return datetime.fromtimestamp(time_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
