"""Acknowledgements that confirm an entry."""

import pytest

from ledgers.appending import AckWindow


def window(*, confirmed: int = -1, ack_quorum: int = 2) -> AckWindow:
    """Return a window with E 3, W 2: entry e goes to indexes e mod 3 and the one after it."""
    return AckWindow(confirmed=confirmed, ensemble_size=3, write_quorum=2, ack_quorum=ack_quorum)


def test_an_entry_is_sent_to_its_write_set() -> None:
    acks = window(confirmed=4)

    assert [acks.begin(entry_id) for entry_id in (5, 6)] == [(2, 0), (0, 1)]


def test_an_ack_quorum_of_acknowledgements_confirms_an_entry() -> None:
    acks = window()
    acks.begin(0)

    acks.acknowledge(0, 0)
    assert acks.confirm() == []
    acks.acknowledge(0, 1)
    assert acks.confirm() == [0]
    assert acks.confirmed == 0


def test_the_same_bookie_index_counts_once() -> None:
    acks = window()
    acks.begin(0)

    acks.acknowledge(0, 0)
    acks.acknowledge(0, 0)

    assert acks.confirm() == []


def test_no_entry_is_confirmed_before_all_lower_ones() -> None:
    acks = window()
    for entry_id in range(3):
        acks.begin(entry_id)

    for entry_id, index in [(2, 2), (2, 0), (1, 1), (1, 2)]:
        acks.acknowledge(entry_id, index)
    assert acks.confirm() == []
    for index in (0, 1):
        acks.acknowledge(0, index)
    assert acks.confirm() == [0, 1, 2]


def test_a_late_acknowledgement_changes_nothing() -> None:
    acks = window(ack_quorum=1)
    acks.begin(0)
    acks.acknowledge(0, 0)
    acks.confirm()

    acks.acknowledge(0, 1)

    assert acks.confirm() == []


def test_acknowledgements_of_a_replaced_bookie_no_longer_count() -> None:
    acks = window()
    for entry_id in range(3):
        acks.begin(entry_id)
    acks.acknowledge(0, 0)
    acks.acknowledge(2, 2)
    acks.acknowledge(2, 0)

    assert acks.withdraw(0) == [0, 2]

    acks.acknowledge(0, 1)
    assert acks.confirm() == []
    acks.acknowledge(0, 0)
    assert acks.confirm() == [0]


def test_an_entry_out_of_order_is_a_mistake_of_ours() -> None:
    with pytest.raises(AssertionError):
        window().begin(1)
