"""``report.html``: one self-contained page for people, which loads nothing from the network.

Programs may read it too: each count has an element such as ``id="verdict-lost"`` with the number in
``data-count``. ElementTree escapes everything from the cluster, bookie ids included.
"""

from collections import defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from xml.etree.ElementTree import Element, SubElement, tostring

import pyarrow as pa
import pyarrow.compute as pc

from auditor.fsck.results.run_folder import Results
from auditor.fsck.results.summary import Summary
from auditor.fsck.verdicts import Grade, LedgerVerdict, evidence_text
from ledgers.plain_files import replace_file
from ledgers.sizes import size_text

REPORT_FILE = "report.html"
WORST_MAX = 200
"""Number of ledgers in the table."""
EVIDENCE_MAX = 20
"""Number of observations shown for one ledger."""
BOOKIES_MAX = 50
POLICY = "default-src 'none'; style-src 'unsafe-inline'"
STYLE = """
:root { color-scheme: light dark; }
body { margin: 0 auto; padding: 1rem; max-width: 70rem; font: 16px/1.5 system-ui, sans-serif; }
body { overflow-wrap: anywhere; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .3rem .6rem .3rem 0; }
tr { border-bottom: 1px solid #8886; }
"""


def write_report(
    results: Results, *, headline: str, tails: str, advice: Sequence[tuple[str, str]]
) -> Path:
    """Write the page beside the results, and return its path.

    ``headline``: a sentence on the whole result. ``tails``: on open ledgers whose tail was not
    checked; may be empty. ``advice``: titles and texts, the most urgent first.
    """
    summary = results.summary
    html = Element("html", lang="en")
    head, body = SubElement(html, "head"), SubElement(html, "body")
    SubElement(head, "meta", charset="utf-8")
    SubElement(head, "meta", name="viewport", content="width=device-width, initial-scale=1")
    SubElement(head, "meta", {"http-equiv": "Content-Security-Policy", "content": POLICY})
    _add(head, "title", f"fsck {summary.run}")
    _add(head, "style", STYLE)
    _add(body, "h1", headline, id="headline")
    _add(body, "p", f"{'; '.join(_facts(summary))}.")
    _add_counts(body, summary)
    if tails:
        _count(
            _add(body, "p", f"{tails[0].upper()}{tails[1:]}."),
            "tails-unseen",
            summary.counts.tails_unseen,
        )
    _add(body, "h2", "What to do next")
    if not advice:
        _add(body, "p", "Nothing.")
    for title, text in advice:
        _add(_add(body, "p"), "b", f"{title}. ").tail = text
    _add_bookies(body, results)
    _add_ledgers(body, results)
    _add(body, "p", f"One row for each ledger, in Parquet files: {results.path}")
    _count(
        _add(body, "p", f"Exit code of this run: {summary.exit_code}."),
        "exit-code",
        summary.exit_code,
    )
    path = results.folder / REPORT_FILE
    replace_file(path, "<!doctype html>\n" + tostring(html, encoding="unicode", method="html"))
    return path


def _facts(summary: Summary) -> list[str]:
    ended = datetime.fromtimestamp(summary.finished_ms / 1000, UTC)
    took_s = max(0, summary.finished_ms - summary.started_ms) // 1000
    read = size_text(summary.counts.bytes_read)
    only = ", changed ledgers only" if summary.is_changed_only else ""
    facts = [
        f"fsck, run {summary.run}, level {summary.level.value}{only}",
        f"ended {ended:%Y-%m-%d %H:%M:%S UTC} after {took_s:,} s",
        f"{summary.counts.entries_read:,} entries and {read} read",
    ]
    if summary.left:
        facts.append(f"{summary.left:,} ledgers not checked: the time was up")
    if summary.gone:
        facts.append(f"{summary.gone:,} ledgers deleted during the run")
    return facts


def _add_counts(body: Element, summary: Summary) -> None:
    counts = summary.counts
    table = _table(body, "ledgers", "")
    rows = [("ledgers", "checked", counts.ledgers)]
    rows += [(f"verdict-{g.value}", g.value, counts.verdicts.get(g.value, 0)) for g in Grade]
    rows += [(f"finding-{name}", name, count) for name, count in counts.findings.items() if count]
    for name, title, count in rows:
        row = SubElement(table, "tr")
        _add(row, "td", _words(title))
        _count(_add(row, "td", f"{count:,}"), name, count)


def _add_bookies(body: Element, results: Results) -> None:
    """Add the number of ledgers with findings at each bookie, the bookie with most first. Counted
    column by column, so that a million ledgers fit in memory."""
    rows = results.table(
        ["ledger_id", "evidence"], where=pc.list_value_length(pc.field("evidence")) > 0
    ).combine_chunks()
    flat = pc.list_flatten(rows["evidence"])
    observed = pa.table(
        {
            "ledger_id": rows["ledger_id"].take(pc.list_parent_indices(rows["evidence"])),
            "bookie": pc.struct_field(flat, "bookie"),
            "finding": pc.struct_field(flat, "finding"),
        }
    )
    observed = observed.filter(pc.is_valid(observed["bookie"]))
    distinct = [("ledger_id", "count_distinct")]
    by_finding: dict[str, list[str]] = defaultdict(list)
    for each in observed.group_by(["bookie", "finding"]).aggregate(distinct).to_pylist():
        found = f"{_words(each['finding'])} {each['ledger_id_count_distinct']:,}"
        by_finding[each["bookie"]].append(found)
    bookies = observed.group_by("bookie").aggregate(distinct)
    order = [("ledger_id_count_distinct", "descending"), ("bookie", "ascending")]
    if not bookies.num_rows:
        return
    table = _table(body, "bookie", "ledgers", "findings")
    for each in bookies.sort_by(order).slice(0, BOOKIES_MAX).to_pylist():
        row = SubElement(table, "tr", {"data-place": each["bookie"]})
        count = f"{each['ledger_id_count_distinct']:,}"
        _add_cells(row, each["bookie"], count, "; ".join(sorted(by_finding[each["bookie"]])))
    if bookies.num_rows > BOOKIES_MAX:
        _add(body, "p", f"and {bookies.num_rows - BOOKIES_MAX:,} more bookies.")


def _add_ledgers(body: Element, results: Results) -> None:
    """Add the ledgers with a finding or a grade below whole, the most urgent first."""
    listed = results.table(
        ["ledger_id", "verdict", "is_wrong", "length"],
        where=(pc.field("verdict") != Grade.WHOLE.value)
        | (pc.list_value_length(pc.field("reasons")) > 0),
    )
    if not listed.num_rows:
        return
    ranks = [Grade(value).rank for value in listed["verdict"].to_pylist()]
    order = [
        *(("is_wrong", "descending"), ("rank", "ascending")),
        *(("length", "descending"), ("ledger_id", "ascending")),
    ]
    listed = listed.append_column("rank", pa.array(ranks, pa.int32())).sort_by(order)
    ledger_ids = listed["ledger_id"].slice(0, WORST_MAX).to_pylist()
    found = {v.ledger_id: v for v in results.verdicts(pc.field("ledger_id").isin(ledger_ids))}
    table = _table(body, "ledger", "verdict", "metadata", "evidence")
    for verdict in map(found.__getitem__, ledger_ids):
        _add_ledger(table, verdict)
    if listed.num_rows > WORST_MAX:
        _add(body, "p", f"{listed.num_rows - WORST_MAX:,} more: see the Parquet files.")


def _add_ledger(table: Element, verdict: LedgerVerdict) -> None:
    row = SubElement(
        table,
        "tr",
        {"data-ledger": str(verdict.ledger_id), "data-verdict": verdict.grade.value},
    )
    facts = [verdict.state or "metadata unreadable", size_text(verdict.length)]
    if verdict.last_entry_id >= 0:
        facts.append(f"last entry {verdict.last_entry_id:,}")
    if verdict.rests_on_unknown:
        facts.append("some copies unknown")
    _add_cells(row, str(verdict.ledger_id), _words(verdict.grade.value), ", ".join(facts))
    cell = SubElement(row, "td")
    shown = verdict.evidence[:EVIDENCE_MAX]
    for each in shown:
        _add(cell, "div", evidence_text(each))
    if left_out := len(verdict.evidence) - len(shown) + verdict.evidence_left_out:
        _add(cell, "div", f"and {left_out:,} more pieces of evidence.")


def _add(parent: Element, tag: str, text: str = "", **attributes: str) -> Element:
    made = SubElement(parent, tag, attributes)
    made.text = text
    return made


def _count(element: Element, name: str, count: int) -> None:
    element.attrib |= {"id": name, "data-count": str(count)}


def _table(body: Element, *titles: str) -> Element:
    table = SubElement(body, "table")
    row = SubElement(table, "tr")
    for title in titles:
        _add(row, "th", title)
    return table


def _add_cells(row: Element, *texts: str) -> None:
    for text in texts:
        _add(row, "td", text)


def _words(name: str) -> str:
    return name.replace("_", " ")
