"""The report has the counts of the summary, loads nothing, and escapes text."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from auditor.fsck.options import Level
from auditor.fsck.results.report import EVIDENCE_MAX, WORST_MAX, write_report
from auditor.fsck.results.run_folder import Results
from auditor.fsck.verdicts import Finding, Grade, LedgerVerdict
from daemon.fsck.advice import advice_for, headline, tails_text
from ledgers.model import BookieId
from tests.fsck.results import damaged, leave_results, seen, whole

A, B = BookieId("a:3181"), BookieId("b:3181")
EVIL = BookieId("<script>alert('1')</script>&\"")
LOST = damaged(1, Grade.LOST, seen(Finding.MISSING, A), seen(Finding.BAD_DIGEST, B))
UNKNOWN = damaged(4, Grade.UNKNOWN, seen(Finding.NOT_ANSWERED, B))


class Page(HTMLParser):
    """The contents of a page: tags with their attributes, and text."""

    VOID = frozenset({"meta"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == [], "tags that were never closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {key: value or "" for key, value in attrs}))
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {key: value or "" for key, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def counts(self) -> dict[str, int]:
        """Return the counts by element id."""
        return {
            attrs["id"]: int(attrs["data-count"])
            for _, attrs in self.tags
            if "id" in attrs and "data-count" in attrs
        }

    def values(self, attribute: str) -> list[str]:
        return [attrs[attribute] for _, attrs in self.tags if attribute in attrs]


def text_of(results: Results) -> str:
    """Return the page of a run."""
    summary = results.summary
    path = write_report(
        results,
        headline=headline(summary),
        tails=tails_text(summary.counts),
        advice=advice_for(summary),
    )
    return path.read_text()


def page_of(folder: Path, verdicts: list[LedgerVerdict]) -> Page:
    return Page(text_of(leave_results(folder, verdicts)))


def test_the_counts_of_the_page_and_the_summary_are_equal(tmp_path: Path) -> None:
    verdicts = [*(whole(number) for number in range(10, 1_244)), LOST, UNKNOWN]
    summary = leave_results(tmp_path / "0", verdicts).summary

    page = page_of(tmp_path / "1", verdicts)

    told = page.counts()
    assert told["ledgers"] == summary.counts.ledgers == 1_236
    assert told["exit-code"] == summary.exit_code == 1
    for verdict, count in summary.counts.verdicts.items():
        assert told[f"verdict-{verdict}"] == count
    found = {key.removeprefix("finding-"): told[key] for key in told if key.startswith("finding-")}
    assert found == {name: count for name, count in summary.counts.findings.items() if count}
    assert "1,234" in page.text


def test_the_page_loads_nothing_else(tmp_path: Path) -> None:
    text = text_of(leave_results(tmp_path, [LOST, UNKNOWN, whole(2)]))

    assert not re.search(r"https?:|//|src=|url\(|@import|<link|<script", text)
    assert "default-src 'none'" in text
    assert "color-scheme: light dark" in text
    assert 'name="viewport"' in text


def test_bookie_ids_are_escaped(tmp_path: Path) -> None:
    verdict = damaged(
        1, Grade.LOST, seen(Finding.MISSING, EVIL, detail="<b>no</b>", code="</table>")
    )

    page = page_of(tmp_path, [verdict])

    assert EVIL in page.text
    assert EVIL in page.values("data-place")
    assert "<b>no</b>" in page.text
    assert not [tag for tag, _ in page.tags if tag == "script"]


def test_only_ledgers_with_findings_are_listed_worst_first(tmp_path: Path) -> None:
    at_risk = damaged(
        2, Grade.AT_RISK, seen(Finding.MISSING, A), seen(Finding.MISSING, A), length=5
    )
    large = damaged(9, Grade.AT_RISK, seen(Finding.MISSING, A))
    legal = damaged(5, Grade.DEGRADED, seen(Finding.ACK_QUORUM_ONLY, A))
    suspect = damaged(6, Grade.WHOLE, seen(Finding.SUSPECT, B))
    idle = damaged(7, Grade.WHOLE, seen(Finding.IDLE_OPEN))

    page = page_of(tmp_path, [whole(0), at_risk, large, LOST, UNKNOWN, legal, suspect, idle])

    assert page.values("data-ledger") == ["1", "9", "2", "6", "5", "4", "7"]
    assert page.values("data-place") == [A, B], "a ledger counts once for each bookie"
    assert "ack quorum only 1; missing 3" in page.text


def test_the_page_is_bounded_and_counts_the_rest(tmp_path: Path) -> None:
    evidence = [seen(Finding.MISSING, A, first_entry_id=i, last_entry_id=i) for i in range(30)]
    many = [damaged(i, Grade.DEGRADED, *evidence, evidence_left_out=70) for i in range(210)]

    page = page_of(tmp_path, many)

    assert len(page.values("data-ledger")) == WORST_MAX
    assert "10 more" in page.text
    assert f"and {100 - EVIDENCE_MAX} more pieces of evidence" in page.text


def test_a_healthy_cluster_has_a_page(tmp_path: Path) -> None:
    page = page_of(tmp_path, [whole(0)])

    assert "All checked ledgers are whole" in page.text
    assert "Nothing." in page.text
    assert page.counts()["verdict-whole"] == 1


# --- Advice ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grade", "title"),
    [
        (Grade.LOST, "Ledgers with entries that have no good copy left: 1"),
        (Grade.AT_RISK, "Ledgers with entries that have one good copy left: 1"),
        (Grade.UNKNOWN, "Ledgers that could not be checked completely: 1"),
    ],
    ids=str,
)
def test_each_bad_grade_has_advice(tmp_path: Path, grade: Grade, title: str) -> None:
    summary = leave_results(tmp_path, [damaged(1, grade)]).summary

    assert [each.title for each in advice_for(summary)] == [title]


@pytest.mark.parametrize("finding", list(Finding), ids=lambda finding: finding.value)
def test_each_finding_that_needs_work_has_advice(tmp_path: Path, finding: Finding) -> None:
    is_nothing_to_do = finding in (Finding.ACK_QUORUM_ONLY, Finding.NOT_ANSWERED)
    verdict = damaged(1, Grade.DEGRADED, seen(finding, A))

    assert (advice_for(leave_results(tmp_path, [verdict]).summary) == []) is is_nothing_to_do


def test_denied_metadata_comes_before_damaged_metadata(tmp_path: Path) -> None:
    """The advice is to open the ACLs; only damaged metadata can be restored."""
    verdict = damaged(1, Grade.UNKNOWN, seen(Finding.UNREADABLE_METADATA, A))

    advice = str(advice_for(leave_results(tmp_path, [verdict]).summary))

    assert advice.index("setAcl") < advice.index("For damaged metadata, bookmender ledger restore")


@pytest.mark.parametrize(
    ("verdicts", "said"),
    [
        ([LOST, UNKNOWN], "lost"),
        ([damaged(1, Grade.AT_RISK, seen(Finding.MISSING, A))], "one good copy"),
        ([damaged(1, Grade.DEGRADED, seen(Finding.MISSING, A))], "missing or bad"),
        ([UNKNOWN], "not be checked completely"),
        ([whole(1)], "All checked ledgers are whole"),
    ],
)
def test_the_headline_is_the_worst_result(
    tmp_path: Path, verdicts: list[LedgerVerdict], said: str
) -> None:
    assert said in headline(leave_results(tmp_path, verdicts).summary)


AWAY = [
    replace(
        damaged(n, Grade.AT_RISK, *(seen(Finding.BOOKIE_GONE, bookie) for bookie in bookies)),
        fragments=(replace(whole(n).fragments[0], ensemble=(A, B), copies_least=0),),
    )
    for n, bookies in ((1, [A, B]), (2, [B]))
]


@pytest.mark.parametrize(
    ("verdicts", "changes", "facts"),
    [
        pytest.param(AWAY, {}, (f"start {B}, {A}", "2 ledgers"), id="bookies to start"),
        pytest.param([whole(1)], {"level": Level.METADATA}, ("No copy was read",), id="metadata"),
        pytest.param([whole(1)], {"left": 1_200}, ("whole", "1,200 ledgers"), id="ledgers left"),
    ],
)
def test_the_headline_says_what_to_do_and_what_is_not_known(
    tmp_path: Path, verdicts: list[LedgerVerdict], changes: dict[str, Any], facts: tuple[str, ...]
) -> None:
    told = headline(leave_results(tmp_path, verdicts, **changes).summary)

    assert all(fact in told for fact in facts), told
