"""What ``bookmender status`` says of its verdict: nobody is to be misled by a single word."""

from dataclasses import replace

import pytest

from auditor.fsck.levels import Level
from auditor.fsck.results.summary import Counts, Summary
from auditor.ledger_map_updater import LedgerMapRecord
from auditor.records import DrainProgress
from auditor.unavailable_ledgers import UnavailableLedgers
from daemon.cli.bookies import BookieRow, BookieState
from daemon.status.command import render
from daemon.status.leader import LeaderState
from daemon.status.verdict import verdict_text
from ledgers.model import BookieId
from replication.nodes import Role
from replication.orders import DrainOrder, MaintenanceWindow
from replication.reasons import Reason
from tests.daemon.status_values import WHOLE, node, note
from tests.replication.ledger_values import B1, B2, B3

BUILT = LedgerMapRecord(session_id=5, written_ms=0, is_complete=True, ledger_count=9)


def away(bookie: BookieId) -> BookieRow:
    window = MaintenanceWindow(since_ms=0, until_ms=60_000)
    return BookieRow(bookie=bookie, state=BookieState.AWAY, has_cookie=True, maintenance=window)


@pytest.mark.parametrize(
    ("bookies", "naming", "changes", "text"),
    [
        pytest.param([B1], {}, {}, "its ledgers are a copy short meanwhile", id="nobody told"),
        pytest.param([B1], {B1: 2}, {}, "its ledgers are a copy short meanwhile", id="two do"),
        pytest.param(
            [B1], {B1: 0}, {}, "no ledger names it, and nothing is affected", id="none does"
        ),
        pytest.param(
            [B1],
            {B1: 0},
            {"are_all_named": False},
            "its ledgers are a copy short meanwhile",
            id="none that was read so far",
        ),
        pytest.param(
            [B1],
            {B1: 0},
            {"index": replace(BUILT, unreadable_count=1)},
            "its ledgers are a copy short meanwhile",
            id="none that can be read",
        ),
        pytest.param(
            [B1, B2],
            {B1: 0, B2: 0},
            {},
            "no ledger names them, and nothing is affected",
            id="neither of two",
        ),
        pytest.param(
            [B1, B2],
            {B1: 0, B2: 1},
            {},
            "ledgers of 1 of them are a copy short meanwhile",
            id="one of two",
        ),
    ],
)
def test_of_maintenance_it_is_said_what_is_short_of_copies(
    bookies: list[BookieId], naming: dict[BookieId, int], changes: dict[str, object], text: str
) -> None:
    state = replace(
        LeaderState(index=BUILT, naming=naming, are_all_named=True),
        **changes,  # type: ignore[arg-type]
    )
    status = replace(WHOLE, ordered=tuple(map(away, bookies)), auditing=state)

    told = verdict_text(status, now_ms=0)

    assert told.startswith("maintenance (")
    assert told.endswith(f" for another 1 min at most: {text})")


TWO_NAMED = LeaderState(index=BUILT, naming={B1: 2, B2: 1}, are_all_named=True)


@pytest.mark.parametrize(
    ("state", "verdict", "exit_code", "text"),
    [
        pytest.param(
            replace(TWO_NAMED, unavailable=UnavailableLedgers(count=0)),
            "maintenance",
            0,
            "2 bookies are away on purpose, for another 1 min at most: their ledgers are short of copies "
            "meanwhile, but each entry has one that is there",
            id="a copy of each entry is left",
        ),
        pytest.param(
            replace(TWO_NAMED, unavailable=UnavailableLedgers(count=1)),
            "copies-away",
            1,
            "1 ledger has entries whose every copy is on a bookie that is away: nobody can read these until one "
            "of their bookies is back; 2 bookies are away on purpose, for another 1 min at most",
            id="none is left of some",
        ),
        pytest.param(
            TWO_NAMED,
            "maintenance",
            3,
            "2 bookies are away on purpose, for another 1 min at most: whether each entry has a copy that is "
            "there is not known, as the leader has not counted yet",
            id="another went just now",
        ),
        pytest.param(
            LeaderState(),
            "maintenance",
            3,
            "2 bookies are away on purpose, for another 1 min at most: whether each entry has a copy that is "
            "there is not known, as no node of ours leads",
            id="Java leads",
        ),
    ],
)
def test_of_two_bookies_under_maintenance_it_is_told_whether_all_can_be_read(
    state: LeaderState, verdict: str, exit_code: int, text: str
) -> None:
    leader = None if state.index is None else node("host-a", 11, Role.AUDITOR)
    found = replace(WHOLE, leader_node=leader, ordered=tuple(map(away, [B1, B2])), auditing=state)

    assert (found.verdict, found.exit_code) == (verdict, exit_code)
    assert verdict_text(found, now_ms=0) == f"{verdict} ({text})"
    count = None if state.unavailable is None else state.unavailable.count
    assert found.to_json()["auditing"]["copyless_ledgers"] == count


@pytest.mark.parametrize(
    ("unavailable", "text"),
    [
        pytest.param(
            UnavailableLedgers(count=1, first=(7,), restored_by={B1: 1, B2: 1}),
            f"ledger 7; start one of {B1}, {B2}",
            id="each of two is enough",
        ),
        pytest.param(
            UnavailableLedgers(
                count=9, first=(1, 2, 3, 4, 5, 6, 7, 8, 9), restored_by={B1: 4, B2: 9}
            ),
            f"ledger 1, 2, 3, 4, 5 and 4 more; start {B2}",
            id="one is enough for all",
        ),
        pytest.param(
            UnavailableLedgers(count=3, first=(1, 2, 3), restored_by={B1: 1, B2: 2, B3: 0}),
            f"ledger 1, 2, 3; start {B2} (enough for 2), {B1} (enough for 1)",
            id="each is enough for some",
        ),
        pytest.param(
            UnavailableLedgers(count=1, first=(1,), restored_by={B1: 0, B2: 0}),
            f"ledger 1; start {B1}, {B2}",
            id="more than one is wanted",
        ),
    ],
)
def test_of_what_cannot_be_read_some_is_named_and_whom_to_start(
    unavailable: UnavailableLedgers, text: str
) -> None:
    found = replace(WHOLE, auditing=replace(TWO_NAMED, unavailable=unavailable))

    told = verdict_text(found, now_ms=0)

    assert told.startswith("copies-away (")
    assert told.endswith(f"until one of their bookies is back: {text})")


def test_what_cannot_be_read_is_told_beside_other_verdicts_too() -> None:
    state = LeaderState(
        index=replace(BUILT, is_complete=False),
        naming={B1: 2},
        unavailable=UnavailableLedgers(count=3),
    )
    leader = node("host-a", 11, Role.AUDITOR)
    found = replace(WHOLE, leader_node=leader, auditing=state, lost=(B1,), marked_count=2)

    assert verdict_text(found, now_ms=0) == (
        "repairing (at least 3 ledgers have entries whose every copy is on a bookie that is away: nobody can "
        "read these until one of their bookies is back)"
    )


def fsck(*, wrong: int = 0, unknown: int = 0, marked: int | None = None) -> Summary:
    counts = Counts(ledgers=9, wrong=wrong, verdicts={"unknown": unknown, "lost": wrong})
    return Summary(
        run="r", level=Level.FULL, started_ms=0, finished_ms=0, counts=counts, marked=marked
    )


UNMARKED = "bookmender fsck mark DIR says which can be mended"
UNKNOWN = "could not tell of 3 ledgers: its report says why; see that every bookie answers, and run it again"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        pytest.param({"fsck": fsck()}, "whole", id="it found nothing"),
        pytest.param({"fsck": fsck(unknown=3)}, f"whole (the last fsck {UNKNOWN})", id="unknown"),
        pytest.param(
            {"fsck": fsck(wrong=4)},
            f"whole (the last fsck found 4 ledgers wrong, none of them marked since: {UNMARKED})",
            id="wrong, and nobody saw to it",
        ),
        pytest.param(
            {"fsck": fsck(wrong=4, marked=4)},
            "whole (the last fsck found 4 ledgers wrong, 4 of them marked since, none any more: another "
            "fsck run tells whether they are mended)",
            id="all of it was marked",
        ),
        pytest.param(
            {"fsck": fsck(wrong=4, marked=3)},
            "whole (the last fsck found 4 ledgers wrong, 3 of them marked since, none any more: another "
            f"fsck run tells whether they are mended; 1 never: {UNMARKED})",
            id="some of it was",
        ),
        pytest.param(
            {"fsck": fsck(), "fsck_closer": fsck(wrong=2, unknown=3)},
            f"whole (a closer fsck found 2 ledgers wrong, none of them marked since: {UNMARKED}; a closer fsck {UNKNOWN})",
            id="an earlier one that looked more closely",
        ),
        pytest.param({"fsck": fsck(wrong=1), "lost": (B1,)}, "bookies-lost", id="not well anyway"),
    ],
)
def test_a_whole_cluster_of_which_fsck_doubts_is_told_with_the_doubt(
    changes: dict[str, object], text: str
) -> None:
    status = replace(WHOLE, **changes)  # type: ignore[arg-type]

    assert verdict_text(status, now_ms=0) == text
    assert status.exit_code == replace(status, fsck=None, fsck_closer=None).exit_code


@pytest.mark.parametrize(
    ("next_try_ms", "text"),
    [
        pytest.param(180_000, "next try in 3 min", id="a long time yet"),
        pytest.param(500, "next try in 1 s", id="rounded up"),
        pytest.param(0, "next try due", id="at any time"),
    ],
)
def test_a_reason_may_be_outdated_so_the_next_try_is_told(next_try_ms: int, text: str) -> None:
    waiting = replace(note(7, Reason.NO_COPY), next_try_ms=next_try_ms)
    status = replace(WHOLE, marked_count=1, waiting=(waiting,), waiting_count=1)

    lines = render(status, now_ms=0).splitlines()

    assert f"  1 no-copy, for up to 0 s, {text}: ledger 7" in lines


@pytest.mark.parametrize(
    ("until_ms", "text"),
    [
        pytest.param((20_000, 40_000), "grace over in 20 s", id="the first of them"),
        pytest.param((20_000, 0), "next try due", id="one waits for no grace"),
        pytest.param((-1_000, -1_000), "grace over", id="its node is about to go on"),
    ],
)
def test_of_a_grace_its_end_is_told(until_ms: tuple[int, int], text: str) -> None:
    waiting = tuple(
        replace(note(ledger_id, Reason.OPEN_LEDGER_GRACE), grace_until_ms=each)
        for ledger_id, each in enumerate(until_ms)
    )
    status = replace(WHOLE, marked_count=2, waiting=waiting, waiting_count=2)

    lines = render(status, now_ms=0).splitlines()

    assert f"  2 open-ledger-grace, for up to 0 s, {text}: ledger 0, 1" in lines


def test_a_half_whose_former_session_has_not_expired_yet_is_shown_once() -> None:
    auditor, worker = (node("host-a", 11, role) for role in (Role.AUDITOR, Role.WORKER))
    found = replace(WHOLE, nodes=(auditor, auditor, worker, worker))

    assert "nodes     host-a (pid 11: auditor and worker)" in render(found, now_ms=0).splitlines()


UNDER_WAY = DrainProgress(since_ms=0, ledgers_left=3, ledgers_most=9, is_drained=False)
DRAINED = replace(UNDER_WAY, ledgers_left=0, is_drained=True)
IN_DOUBT = replace(DRAINED, is_drained=False, is_in_doubt=True, unreadable_count=1)


def drained(*progress: DrainProgress | None) -> tuple[BookieRow, ...]:
    return tuple(
        BookieRow(
            bookie=bookie,
            state=BookieState.READ_ONLY,
            has_cookie=True,
            drain=DrainOrder(since_ms=0),
            progress=told,
        )
        for bookie, told in zip((B1, B2), progress, strict=False)
    )


@pytest.mark.parametrize(
    ("ordered", "text"),
    [
        pytest.param(drained(UNDER_WAY), ("1 bookie drains: 3 of 9 ledgers left",), id="one"),
        pytest.param(
            drained(UNDER_WAY, UNDER_WAY), ("2 bookies drain: 6 of 18 ledgers left",), id="two"
        ),
        pytest.param(
            drained(UNDER_WAY, DRAINED), ("1 bookie drains: 3 of 9 ledgers left",), id="one is done"
        ),
        pytest.param(drained(DRAINED, DRAINED), (), id="both are"),
        pytest.param(
            drained(UNDER_WAY, None),
            ("2 bookies drain: how many ledgers are left is not known yet",),
            id="nobody has looked",
        ),
        pytest.param(
            drained(IN_DOUBT),
            ("1 bookie drains: no ledger left but those that cannot be read",),
            id="nothing left but doubt",
        ),
    ],
)
def test_a_whole_cluster_in_which_bookies_drain_is_told_with_what_is_left(
    ordered: tuple[BookieRow, ...], text: tuple[str, ...]
) -> None:
    status = replace(WHOLE, ordered=ordered)

    assert verdict_text(status, now_ms=0) == " ".join(("whole", *(f"({each})" for each in text)))
    assert status.exit_code == 0, "no ledger misses a copy"
    away_too = replace(status, ordered=(*ordered, away(B3)))
    assert verdict_text(away_too, now_ms=0).endswith("".join(f"; {each})" for each in text) or ")")
    assert verdict_text(replace(status, lost=(B3,)), now_ms=0) == "bookies-lost"
