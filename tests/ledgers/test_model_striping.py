"""Write sets, and the entries of a bookie index, compared with Java's."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ledgers.model import StripedEntries, covers, entries_of, stores, write_set
from tests.vectors import Case, cases


def _name(case: Case) -> str:
    quorums = (case["ensemble_size"], case["write_quorum"], case.get("ack_quorum"))
    return "-".join(str(quorum) for quorum in quorums if quorum is not None)


def _sizes(case: Case) -> dict[str, int]:
    return {"ensemble_size": case["ensemble_size"], "write_quorum": case["write_quorum"]}


@pytest.mark.compat("G20", verdict="better", why="integers have no size limit here")
@pytest.mark.parametrize("case", cases("write_sets"), ids=_name)
def test_entries_are_stored_where_java_writers_write_them(case: Case) -> None:
    found = [write_set(entry["entry_id"], **_sizes(case)) for entry in case["entries"]]

    assert found == [tuple(entry["write_set"]) for entry in case["entries"]]


@pytest.mark.compat("G20", verdict="better")
@pytest.mark.parametrize("case", cases("write_sets"), ids=_name)
def test_membership_agrees_with_the_write_set(case: Case) -> None:
    """For ids of any size."""
    for entry in case["entries"]:
        indexes = range(case["ensemble_size"])

        found = {index for index in indexes if stores(index, entry["entry_id"], **_sizes(case))}

        assert found == set(entry["write_set"])


@pytest.mark.compat("TestLedgerFragmentReplication.testSplitLedgerFragmentState", verdict="same")
@pytest.mark.parametrize("case", cases("striped_ranges"), ids=_name)
def test_a_bookie_index_stores_the_entries_that_java_says(case: Case) -> None:
    for entries in case["ranges"]:
        found = [
            list(
                entries_of(
                    index,
                    first_entry_id=entries["first_entry_id"],
                    last_entry_id=entries["last_entry_id"],
                    **_sizes(case),
                )
            )
            for index in range(case["ensemble_size"])
        ]

        assert found == entries["by_bookie_index"]


@pytest.mark.parametrize("case", cases("coverage"), ids=_name)
def test_the_sets_that_cover_are_exactly_those_of_java(case: Case) -> None:
    size = case["ensemble_size"]
    subsets = [{i for i in range(size) if bits >> i & 1} for bits in range(1 << size)]

    found = [
        known for known in subsets if covers(known, ack_quorum=case["ack_quorum"], **_sizes(case))
    ]

    expected = [set(known) for known in case["known_sets_that_cover"]]
    assert sorted(map(sorted, found)) == sorted(map(sorted, expected))


def test_an_empty_set_of_answers_covers_nothing() -> None:
    assert not covers(set(), ensemble_size=3, write_quorum=3, ack_quorum=3)


@st.composite
def _stripes(draw: st.DrawFn) -> tuple[StripedEntries, list[int]]:
    """Draw striped entries, and the same ids computed the plain way."""
    size = draw(st.integers(1, 9))
    quorum = draw(st.integers(1, size))
    index = draw(st.integers(0, size - 1))
    first = draw(st.integers(0, 40) | st.integers(2**31 - 20, 2**31 + 20) | st.just(2**63 - 60))
    last = first + draw(st.integers(-3, 50))
    entries = entries_of(
        index, first_entry_id=first, last_entry_id=last, ensemble_size=size, write_quorum=quorum
    )
    plain = [
        entry_id
        for entry_id in range(first, last + 1)
        if index in write_set(entry_id, ensemble_size=size, write_quorum=quorum)
    ]
    return entries, plain


@pytest.mark.compat(
    "G21",
    verdict="better",
    why="the entries of a fragment are an arithmetic sequence, never a list",
)
@given(_stripes())
def test_striped_entries_behave_like_a_tuple(stripe: tuple[StripedEntries, list[int]]) -> None:
    entries, plain = stripe

    assert list(entries) == plain
    assert len(entries) == len(plain)
    assert [entries[position] for position in range(len(plain))] == plain
    assert [entries[-position - 1] for position in range(len(plain))] == plain[::-1]
    assert entries.first == (plain[0] if plain else None)
    assert entries.last == (plain[-1] if plain else None)
    around = range(plain[0] - 12, plain[-1] + 12) if plain else range(60)
    assert {entry_id for entry_id in around if entry_id in entries} == set(plain)


@given(_stripes(), st.integers(-60, 60), st.integers(-60, 60))
def test_slices_are_striped_entries_too(
    stripe: tuple[StripedEntries, list[int]], start: int, stop: int
) -> None:
    entries, plain = stripe

    assert list(entries[start:stop]) == plain[start:stop]


@given(_stripes(), st.integers(-5, 60), st.integers(-5, 60))
def test_a_part_between_two_ids_never_reaches_beyond_the_whole(
    stripe: tuple[StripedEntries, list[int]], from_id: int, to_id: int
) -> None:
    entries, plain = stripe
    origin = plain[0] if plain else 0

    part = entries.between(origin + from_id, origin + to_id)

    assert list(part) == [e for e in plain if origin + from_id <= e <= origin + to_id]


@given(_stripes())
def test_positions_outside_are_refused(stripe: tuple[StripedEntries, list[int]]) -> None:
    entries, plain = stripe

    for position in (len(plain), -len(plain) - 1):
        with pytest.raises(IndexError):
            entries[position]


def test_ten_million_entries_need_no_list() -> None:
    entries = entries_of(
        1, first_entry_id=0, last_entry_id=14_999_999, ensemble_size=3, write_quorum=2
    )

    assert len(entries) == 10_000_000
    assert sum(entries) == 3 * sum(range(5_000_000)) * 2 + 5_000_000
    assert entries[9_999_999] == entries.last == 14_999_998
