"""The page that shows, row by row, what ours does and which tests prove it; and what is lacking.

Pure functions of the catalogue and the evidence. The page is the same for the same markers, however
long the tests took and in whatever order they ran.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from tests.compat.catalogue import GAPS, Row
from tests.compat.evidence import Claim, Verdict, Witness

VERDICT_WORDS: Mapping[Verdict, str] = {
    "same": "the same",
    "better": "better",
    "other": "otherwise, on purpose",
}
PASSED = "passed"
ON_BOOKIES = "●"

HEAD = """\
# Compatibility

<!-- Made by `make compat` from the markers of the tests: change those. -->

bookmender takes the place of Apache BookKeeper's Java AutoRecovery, or runs beside it. This page holds
it against what the Java daemon is tested for, test by test, and against gaps that are known in the
Java code, by the numbers that our tests and comments name. Each row says what it is about, whether
ours does the same, better, or deliberately otherwise, and which of our tests show it; those marked
●\u00a0run on real bookies or a real ZooKeeper. `make compat` runs the tests, and fails on a row that
no passing test shows.

What takes too long for each change has targets of its own: `make test-matrix` (a repair on every storage
class, version and layout), `make test-scale` (the auditor with 1,000 bookies and 200,000 ledgers) and
`make soak-audit` (half an hour of losses, killed leaders and restarts of ZooKeeper).
"""


@dataclass(frozen=True, slots=True)
class Shown:
    """A claim about one row, with the test that makes it."""

    witness: Witness
    claim: Claim


def by_row(witnesses: Iterable[Witness]) -> dict[str, list[Shown]]:
    """Everything that is claimed of each row, in the order of files, tests and parameters."""
    found: dict[str, list[Shown]] = defaultdict(list)
    for witness in sorted(witnesses, key=lambda each: each.full_name):
        for claim in witness.claims:
            for name in claim.rows:
                found[name].append(Shown(witness, claim))
    return found


# --- What is lacking -----------------------------------------------------------------------------


def faults(rows: Sequence[Row], witnesses: Iterable[Witness], *, has_run: bool) -> list[str]:
    """Sentences; none when every row is proven. ``has_run``: how the tests ended counts as well."""
    shown = by_row(witnesses)
    known = {row.name for row in rows}
    found = [
        f"{shown[name][0].witness.full_name}: there is no row {name}"
        for name in sorted(shown.keys() - known)
    ]
    for row in rows:
        found.extend(f"{row.name}: {fault}" for fault in _faults_of(row, shown.get(row.name, [])))
        if has_run:
            found.extend(f"{row.name}: {fault}" for fault in _failures(row, shown[row.name]))
    return found


def _faults_of(row: Row, shown: Sequence[Shown]) -> list[str]:
    found = []
    if not shown:
        return ["no test shows it"]
    verdicts = {each.claim.verdict for each in shown}
    if len(verdicts) > 1:
        found.append(f"its tests do not agree on {' or '.join(sorted(verdicts))}")
    if verdicts != {"same"} and not _reasons(shown):
        found.append("none of its tests says why ours does not do the same")
    if row.needs_bookie and not any(each.witness.is_on_bookies for each in shown):
        found.append("its tests run on fakes, where only a real bookie proves anything")
    return found


def _failures(row: Row, shown: Sequence[Shown]) -> list[str]:
    found = [
        f"{each.witness.full_name} {each.witness.outcome or 'did not run'}"
        for each in shown
        if each.witness.outcome not in (PASSED, "skipped")
    ]
    passed = [each.witness for each in shown if each.witness.outcome == PASSED]
    if shown and not passed:
        found.append("none of its tests passed")
    elif row.needs_bookie and not any(each.is_on_bookies for each in passed):
        found.append("none of its tests on real bookies passed")
    return found


# --- The page ------------------------------------------------------------------------------------


def page(rows: Sequence[Row], witnesses: Iterable[Witness]) -> str:
    shown = by_row(witnesses)
    parts = [HEAD]
    for part, rows_of_part in groupby(rows, key=lambda row: row.part):
        parts.append(_part(part, list(rows_of_part), shown))
    return "\n".join(parts)


def _part(part: str, rows: Sequence[Row], shown: Mapping[str, Sequence[Shown]]) -> str:
    lines = [f"## {part.capitalize()}", "", _summary(rows, shown), ""]
    for group, rows_of_group in groupby(rows, key=lambda row: row.group):
        head = "Gap" if group == GAPS else "Test"
        lines += [
            f"### {group}",
            "",
            f"| {head} | What it is about | Ours | Shown by |",
            "| --- | --- | --- | --- |",
            *(_line(row, shown.get(row.name, [])) for row in rows_of_group),
            "",
        ]
    return "\n".join(lines)


def _summary(rows: Sequence[Row], shown: Mapping[str, Sequence[Shown]]) -> str:
    counts = Counter(claims[0].claim.verdict for row in rows if (claims := shown.get(row.name, [])))
    on_bookies = sum(
        any(each.witness.is_on_bookies for each in shown.get(row.name, [])) for row in rows
    )
    verdicts = ", ".join(f"{counts[verdict]} {word}" for verdict, word in VERDICT_WORDS.items())
    return f"{len(rows)} rows: {verdicts}. {on_bookies} are shown on real servers."


def _line(row: Row, shown: Sequence[Shown]) -> str:
    cells = (row.title, row.about, _verdict(shown), "<br>".join(_tests(shown)))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _verdict(shown: Sequence[Shown]) -> str:
    if not shown:
        return ""
    word = VERDICT_WORDS[shown[0].claim.verdict]
    reasons = "; ".join(_reasons(shown))
    return f"**{word}**: {reasons}" if reasons else word


def _reasons(shown: Sequence[Shown]) -> list[str]:
    """Each once, in the order of the tests."""
    return list(dict.fromkeys(each.claim.why for each in shown if each.claim.why))


def _tests(shown: Sequence[Shown]) -> list[str]:
    """A link for each test, whatever its parameters; its name is a sentence."""
    on_bookies: dict[tuple[str, str], bool] = {}
    for each in shown:
        key = (each.witness.file, each.witness.test)
        on_bookies[key] = on_bookies.get(key, False) or each.witness.is_on_bookies
    return [
        f"{ON_BOOKIES + ' ' if is_real else ''}[{_sentence(test)}](../{file})"
        for (file, test), is_real in on_bookies.items()
    ]


def _sentence(test: str) -> str:
    return test.removeprefix("test_").replace("_", " ")
