"""The ledgers of the bench: which bookies store them, and what a loss affects."""

import pytest

from bench.loads import DIGEST, LOADS, VICTIM_INDEX, Load, Part, stake
from ledgers.model import BookieId

BOOKIES = [BookieId(f"127.0.0.1:{port}") for port in range(5)]
VICTIM = BOOKIES[VICTIM_INDEX]


def test_each_entry_is_on_write_quorum_bookies() -> None:
    part = Part(ledger_count=1, entry_count=7, ensemble_size=4, write_quorum=2)
    (ledger,) = Load(name="x", title="", parts=(part,)).ledgers(BOOKIES, first_ledger_id=1)

    holders = [
        sum(entry_id in ledger.stripe(bookie) for bookie in BOOKIES) for entry_id in range(7)
    ]

    assert holders == [2] * 7


def test_entries_are_good_and_stored_where_the_metadata_says() -> None:
    part = Part(ledger_count=1, entry_count=3, payload_bytes=65_536)
    (ledger,) = Load(name="x", title="", parts=(part,)).ledgers(BOOKIES, first_ledger_id=9)

    stored = {bookie: list(ledger.entries(bookie)) for bookie in BOOKIES}

    assert {bookie for bookie, entries in stored.items() if entries} == ledger.metadata().bookies
    for entry_id, entry in enumerate(stored[ledger.ensemble[0]]):
        assert len(entry) == part.entry_bytes
        assert DIGEST.is_good(entry, ledger_id=9, entry_id=entry_id)


def test_open_ledgers_stay_open_and_are_counted() -> None:
    parts = (Part(ledger_count=5, entry_count=2), Part(ledger_count=5, entry_count=2, is_open=True))
    ledgers = Load(name="x", title="", parts=parts).ledgers(BOOKIES, first_ledger_id=1)

    lost = stake(ledgers, VICTIM)

    assert list(lost.values())[:3] == [6, 3, 12]
    assert [ledger.metadata().is_closed for ledger in ledgers] == [True] * 5 + [False] * 5


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
def test_a_quick_load_is_a_much_smaller_one_of_the_same_kind(load: Load) -> None:
    quick = stake(load.quick().ledgers(BOOKIES, first_ledger_id=1), VICTIM)
    full = stake(load.ledgers(BOOKIES, first_ledger_id=1), VICTIM)

    assert 0 < quick["lost_ledgers"] <= full["lost_ledgers"]
    assert quick["lost_entries"] <= full["lost_entries"] / 5
    assert [part.is_open for part in load.quick().parts] == [part.is_open for part in load.parts]
