"""Decisions: an open ledger is left to its writer, or recovered."""

from collections.abc import Mapping

import pytest

from ledgers.model import BookieId, LedgerMetadata, LedgerState, Segment, fragments
from ledgers.registration import BookieView, RegisteredBookie
from replication.cluster import ClusterView
from replication.inspection import leaving_members
from replication.open_ledgers import GRACES_MAX, WriterSighting, next_sighting, wanted_for_coverage
from replication.reasons import Reason
from tests.replication.ledger_values import B1, B2, B3, B4, B5

SEGMENT = Segment(first_entry_id=10, ensemble=(B1, B2, B3))


def sighting(last: int | None, *, grace_count: int = 1) -> WriterSighting:
    return WriterSighting(segment=SEGMENT, last_entries={B2: last}, grace_count=grace_count)


@pytest.mark.parametrize(
    ("before", "last_entries", "grace_count"),
    [
        pytest.param(None, {B2: 12}, 1, id="seen for the first time"),
        pytest.param(sighting(12), {B2: 12}, None, id="nothing was written to it"),
        pytest.param(sighting(12), {B2: 15}, 2, id="its writer continues to write to it"),
        pytest.param(sighting(-1), {B2: 0}, 2, id="its writer has begun to write to it"),
        pytest.param(sighting(12), {B2: None}, None, id="it does not answer any more"),
        pytest.param(sighting(None), {B2: None}, None, id="it never answered"),
        pytest.param(sighting(None), {B2: 12}, 2, id="it answers now, but its history is unknown"),
        pytest.param(sighting(None), {B2: -1}, None, id="it answers now, and has nothing"),
        pytest.param(sighting(12), {B2: -1}, None, id="it was reformatted meanwhile"),
        pytest.param(
            sighting(12, grace_count=GRACES_MAX - 1), {B2: 15}, GRACES_MAX, id="the last grace"
        ),
        pytest.param(sighting(12, grace_count=GRACES_MAX), {B2: 15}, None, id="no grace is left"),
        pytest.param(sighting(12), {B3: None}, 1, id="B2 is back, and another one is absent now"),
        pytest.param(sighting(12), {B2: 12, B3: None}, None, id="another one is absent, too"),
    ],
)
def test_rule_s13_a_writer_that_writes_gets_another_grace(
    before: WriterSighting | None,
    last_entries: Mapping[BookieId, int | None],
    grace_count: int | None,
) -> None:
    after = next_sighting(before, WriterSighting(segment=SEGMENT, last_entries=last_entries))

    assert (after.grace_count if after else None) == grace_count
    if after is not None:
        assert after.last_entries == last_entries


def test_a_changed_ensemble_starts_a_new_grace() -> None:
    changed = Segment(first_entry_id=20, ensemble=(B1, B2, B4))

    now = WriterSighting(segment=changed, last_entries={B2: 12})

    assert next_sighting(sighting(12, grace_count=5), now) == now


def test_the_reason_of_a_grace_names_the_bookie_and_the_count() -> None:
    first, third = sighting(1).blocked, sighting(1, grace_count=3).blocked
    assert first.reason is Reason.OPEN_LEDGER_GRACE
    assert first.facts.absent == (B2,)
    assert third.reason is Reason.WRITER_ALIVE
    assert (third.facts.grace_count, third.facts.grace_count_max) == (3, GRACES_MAX)


def view(*available: BookieId, read_only: tuple[BookieId, ...] = ()) -> ClusterView:
    def registered(bookie: BookieId, *, is_writable: bool) -> RegisteredBookie:
        return RegisteredBookie(bookie_id=bookie, address=None, czxid=1, is_writable=is_writable)

    return ClusterView(
        bookies=BookieView(
            writable={b: registered(b, is_writable=True) for b in available},
            read_only={b: registered(b, is_writable=False) for b in read_only},
        )
    )


def metadata(state: LedgerState = LedgerState.OPEN) -> LedgerMetadata:
    return LedgerMetadata(
        ensemble_size=3,
        write_quorum=2,
        ack_quorum=2,
        state=state,
        segments=(
            Segment(first_entry_id=0, ensemble=(B1, B2, B5)),
            Segment(first_entry_id=5, ensemble=(B1, B2, B4)),
            Segment(first_entry_id=10, ensemble=(B1, B2, B3)),
        ),
    )


@pytest.mark.compat("G10", verdict="better", why="a read-only bookie counts as registered")
@pytest.mark.parametrize(
    ("ledger", "available", "absent"),
    [
        pytest.param(metadata(), view(B1, B2, B3), (), id="those of the last ensemble are there"),
        pytest.param(metadata(), view(B1), (B2, B3), id="two of the last ensemble are not"),
        pytest.param(metadata(LedgerState.IN_RECOVERY), view(B1, B2), (B3,), id="left in recovery"),
        pytest.param(metadata(LedgerState.CLOSED), view(), (), id="closed ledgers are not"),
        pytest.param(metadata(), view(B1, B2, read_only=(B3,)), (), id="read-only ones are there"),
    ],
)
def test_the_bookies_that_an_open_fragment_lacks(
    ledger: LedgerMetadata, available: ClusterView, absent: tuple[BookieId, ...]
) -> None:
    assert leaving_members(ledger, available) == absent


@pytest.mark.parametrize(
    ("lac", "closed"),
    [
        pytest.param(9, [True, True, False], id="all before the last segment is confirmed"),
        pytest.param(8, [False, False, False], id="just before its beginning"),
    ],
)
def test_rule_s4_fragments_close_once_the_lac_is_beyond_them(lac: int, closed: list[bool]) -> None:
    assert [f.is_closed for f in fragments(7, metadata(), lac=lac)] == closed


@pytest.mark.parametrize(
    ("available", "quorums", "wanted"),
    [
        pytest.param({B1, B2, B3}, (3, 2), set(), id="all are there"),
        pytest.param({B1, B3, B4}, (3, 2), set(), id="two of three cover an ack quorum of two"),
        pytest.param({B1, B4}, (3, 2), {B2, B3}, id="the lost two may have acknowledged alone"),
        pytest.param(
            {B1}, (3, 3), set(), id="every ack quorum of three includes the bookie that is left"
        ),
        pytest.param({B2, B3}, (2, 1), {B1}, id="an ack quorum of one may be any of them"),
        pytest.param({B4}, (3, 3), {B1, B2, B3}, id="no bookie is registered"),
    ],
)
def test_rule_s5_the_bookies_needed_to_prove_the_end(
    available: set[BookieId], quorums: tuple[int, int], wanted: set[BookieId]
) -> None:
    write_quorum, ack_quorum = quorums
    metadata = LedgerMetadata(
        ensemble_size=3,
        write_quorum=write_quorum,
        ack_quorum=ack_quorum,
        state=LedgerState.IN_RECOVERY,
        segments=(Segment(first_entry_id=0, ensemble=(B1, B2, B3)),),
    )

    assert wanted_for_coverage(metadata, available) == wanted
