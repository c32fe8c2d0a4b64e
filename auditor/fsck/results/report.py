"""``report.html``: one self-contained page for people, which loads nothing from the network.

Programs may read it too: each count has an element such as ``id="verdict-lost"`` with the number in
``data-count``. ElementTree escapes everything from the cluster, bookie ids included.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from xml.etree.ElementTree import Element, SubElement, tostring

import pyarrow as pa
import pyarrow.compute as pc

from auditor.fsck.results.run_folder import Results
from auditor.fsck.results.summary import Summary
from auditor.fsck.verdicts import Grade, evidence_text
from ledgers.plain_files import replace_file
from ledgers.sizes import size_text

REPORT_FILE = "report.html"
WORST_MAX = 200
"""Number of ledgers in the table."""
EVIDENCE_MAX = 20
"""Number of observations shown for one ledger."""
POLICY = "default-src 'none'; style-src 'unsafe-inline'"
STYLE = """
:root { color-scheme: light dark; }
body { margin: 0 auto; padding: 1rem; max-width: 70rem; font: 16px/1.5 system-ui, sans-serif; }
body { overflow-wrap: anywhere; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .3rem .6rem .3rem 0; }
tr { border-bottom: 1px solid #8886; }
"""


Row = tuple[Mapping[str, str], Sequence[str | Sequence[str]]]
"""The attributes of a table's row, and its cells. A cell may have several lines."""


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
    _add(body, "h1", headline, {"id": "headline"})
    _add(body, "p", f"{'; '.join(_facts(summary))}.")
    counts = summary.counts
    rows = [_counted("ledgers", "checked", counts.ledgers)]
    rows += [
        _counted(f"verdict-{g.value}", g.value, counts.verdicts.get(g.value, 0)) for g in Grade
    ]
    rows += [_counted(f"finding-{name}", name, n) for name, n in counts.findings.items() if n]
    if tails:
        rows.append(_counted("tails-unseen", tails, counts.tails_unseen))
    rows.append(_counted("exit-code", "exit code of this run", summary.exit_code))
    _add_table(body, ["ledgers", ""], rows)
    _add(body, "h2", "What to do next")
    if not advice:
        _add(body, "p", "Nothing.")
    for title, text in advice:
        _add(_add(body, "p"), "b", f"{title}. ").tail = text
    _add_table(body, ["bookie", "ledgers", "findings"], _bookies(results))
    _add_table(body, ["ledger", "verdict", "metadata", "evidence"], _worst_ledgers(results))
    _add(body, "p", f"One row for each ledger, in Parquet files: {results.path}")
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


def _counted(name: str, title: str, count: int) -> Row:
    return {"id": name, "data-count": str(count)}, [_words(title), f"{count:,}"]


def _bookies(results: Results) -> list[Row]:
    """Return the number of ledgers with findings at each bookie, the bookie with most first.
    Counted column by column, so that a million ledgers fit in memory."""
    rows = results.table(
        ["ledger_id", "evidence"], where=pc.list_value_length(pc.field("evidence")) > 0
    ).combine_chunks()
    flat = pc.list_flatten(rows["evidence"])
    observed = pa.table(
        {
            "ledgers": rows["ledger_id"].take(pc.list_parent_indices(rows["evidence"])),
            "bookie": pc.struct_field(flat, "bookie"),
            "finding": pc.struct_field(flat, "finding"),
        }
    )
    observed = observed.filter(pc.is_valid(observed["bookie"]))
    distinct = [("ledgers", "count_distinct")]
    findings: dict[str, list[str]] = defaultdict(list)
    for each in observed.group_by(["bookie", "finding"]).aggregate(distinct).to_pylist():
        found = f"{_words(each['finding'])} {each['ledgers_count_distinct']:,}"
        findings[each["bookie"]].append(found)
    counts = observed.group_by("bookie").aggregate(distinct)
    order = [("ledgers_count_distinct", "descending"), ("bookie", "ascending")]
    found_at: list[Row] = []
    for bookie, count in zip(*counts.sort_by(order).to_pydict().values(), strict=True):
        cells = [bookie, f"{count:,}", "; ".join(sorted(findings[bookie]))]
        found_at.append(({"data-place": bookie}, cells))
    return found_at


def _worst_ledgers(results: Results) -> list[Row]:
    """Return the ledgers with a finding or a grade below whole, the most urgent first, and at the
    end how many more there are."""
    listed = results.table(
        ["ledger_id", "verdict", "is_wrong", "length"],
        where=(pc.field("verdict") != Grade.WHOLE.value)
        | (pc.list_value_length(pc.field("reasons")) > 0),
    )
    ranks = [Grade(value).rank for value in listed["verdict"].to_pylist()]
    order = [
        *(("is_wrong", "descending"), ("rank", "ascending")),
        *(("length", "descending"), ("ledger_id", "ascending")),
    ]
    listed = listed.append_column("rank", pa.array(ranks, pa.int32())).sort_by(order)
    ledger_ids = listed["ledger_id"].slice(0, WORST_MAX).to_pylist()
    found = {v.ledger_id: v for v in results.verdicts(pc.field("ledger_id").isin(ledger_ids))}
    rows: list[Row] = []
    for ledger_id in ledger_ids:
        verdict = found[ledger_id]
        facts = [verdict.state or "metadata unreadable", size_text(verdict.length)]
        if verdict.last_entry_id >= 0:
            facts.append(f"last entry {verdict.last_entry_id:,}")
        if verdict.rests_on_unknown:
            facts.append("some copies unknown")
        lines = [evidence_text(each) for each in verdict.evidence[:EVIDENCE_MAX]]
        if left_out := len(verdict.evidence) - len(lines) + verdict.evidence_left_out:
            lines.append(f"and {left_out:,} more pieces of evidence")
        grade = verdict.grade.value
        cells = [str(ledger_id), _words(grade), ", ".join(facts), lines]
        rows.append(({"data-ledger": str(ledger_id), "data-verdict": grade}, cells))
    if listed.num_rows > WORST_MAX:
        rows.append(({}, [f"{listed.num_rows - WORST_MAX:,} more"]))
    return rows


def _add(
    parent: Element, tag: str, text: str = "", attributes: Mapping[str, str] | None = None
) -> Element:
    made = SubElement(parent, tag, dict(attributes or {}))
    made.text = text
    return made


def _add_table(body: Element, titles: Sequence[str], rows: Sequence[Row]) -> None:
    """Add a table, unless it has no rows."""
    if not rows:
        return
    table = SubElement(body, "table")
    head = SubElement(table, "tr")
    for title in titles:
        _add(head, "th", title)
    for attributes, cells in rows:
        row = _add(table, "tr", attributes=attributes)
        for cell in cells:
            column = _add(row, "td", cell if isinstance(cell, str) else "")
            for line in () if isinstance(cell, str) else cell:
                _add(column, "div", line)


def _words(name: str) -> str:
    return name.replace("_", " ")
