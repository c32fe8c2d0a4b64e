"""The entries of a sample: as many as wanted, spread evenly, and reproducible."""

import pytest

from auditor.fsck.ledger_inspector import sampled
from ledgers.model import stores


@pytest.mark.parametrize("share", [0.001, 0.01, 0.1, 0.3, 0.5, 0.9, 1.0])
def test_a_sample_is_about_the_share_in_order_and_in_range(share: float) -> None:
    found = list(sampled(1_000, 100_999, share=share, seed=7))

    assert found == sorted(set(found))
    assert found[0] >= 1_000
    assert found[-1] <= 100_999
    assert 0.75 * share <= len(found) / 100_000 <= 1.01 * share


def test_a_share_of_1_is_every_entry() -> None:
    assert list(sampled(3, 9, share=1, seed=1)) == [3, 4, 5, 6, 7, 8, 9]


def test_parts_of_a_ledger_have_the_same_sample() -> None:
    whole = list(sampled(0, 9_999, share=0.03, seed=3))
    parts = [
        e
        for start in range(0, 10_000, 1_000)
        for e in sampled(start, start + 999, share=0.03, seed=3)
    ]

    assert parts == whole


def test_another_seed_gives_another_sample() -> None:
    first, second = (set(sampled(0, 9_999, share=0.01, seed=seed)) for seed in (1, 2))

    assert len(first & second) < 10


@pytest.mark.parametrize("share", [0.01, 0.1, 0.25, 0.5])
def test_no_bookie_of_a_stripe_is_left_out(share: float) -> None:
    """A draw in even steps would meet only some of the write sets."""
    size, quorum = 4, 2
    found = list(sampled(0, 99_999, share=share, seed=5))

    for index in range(size):
        own = [e for e in found if stores(index, e, ensemble_size=size, write_quorum=quorum)]
        assert 0.4 < len(own) / len(found) < 0.6
