"""Comparing copies: which differ from the majority."""

import random
from collections.abc import Mapping

import pytest

from auditor.fsck.judge import differing_copies
from ledgers.digest import Fingerprints
from ledgers.model import BookieId, stores
from replication.entry_runs import EntryRuns
from tests.replication.ledger_values import B1, B2, B3, B4, B5, fragment

FIRST, LAST = 100, 139


def copies(
    ensemble: tuple[BookieId, ...], write_quorum: int, changes: Mapping[tuple[BookieId, int], int]
) -> dict[BookieId, Fingerprints]:
    """Return fingerprints per bookie: the entry id, except for ``changes``; 0 for no copy.

    Each list begins at the first entry of its bookie.
    """
    found = {}
    for index, bookie in enumerate(ensemble):
        own = [
            e
            for e in range(FIRST, LAST + 1)
            if stores(index, e, ensemble_size=len(ensemble), write_quorum=write_quorum)
        ]
        made = found[bookie] = Fingerprints(own[0], own[-1])
        for entry_id in own:
            made.values[entry_id - own[0]] = changes.get((bookie, entry_id), entry_id)
    return found


def odd(
    changes: Mapping[tuple[BookieId, int], int],
    *,
    ensemble: tuple[BookieId, ...] = (B1, B2, B3),
    write_quorum: int = 3,
) -> dict[BookieId, EntryRuns]:
    frag = fragment(ensemble, first=50, last=500, write_quorum=write_quorum)
    return differing_copies(frag, FIRST, LAST, copies(ensemble, write_quorum, changes))


@pytest.mark.parametrize(("size", "write_quorum"), [(3, 3), (3, 2), (5, 3), (5, 1)])
def test_equal_copies_are_not_reported(size: int, write_quorum: int) -> None:
    assert odd({}, ensemble=(B1, B2, B3, B4, B5)[:size], write_quorum=write_quorum) == {}


def test_of_two_copies_that_differ_both_are_reported() -> None:
    assert odd({(B2, 117): 1}, ensemble=(B1, B2), write_quorum=2) == {
        B1: EntryRuns([117]),
        B2: EntryRuns([117]),
    }


def test_missing_copies_are_not_compared() -> None:
    assert odd({(B2, 117): 0, (B1, 118): 0, (B2, 118): 0, (B3, 119): 0}) == {}
    assert odd({(B1, 117): 0, (B2, 117): 1}) == {B2: EntryRuns([117]), B3: EntryRuns([117])}


@pytest.mark.parametrize("seed", range(20))
def test_every_differing_copy_is_found(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.randint(3, 5)
    write_quorum = rng.randint(3, size)
    ensemble = (B1, B2, B3, B4, B5)[:size]
    expected: dict[BookieId, list[int]] = {}
    for entry_id in rng.sample(range(FIRST, LAST + 1), 7):
        index = (entry_id + rng.randrange(write_quorum)) % size
        expected.setdefault(ensemble[index], []).append(entry_id)
    changes = {(bookie, entry_id): 1 for bookie, ids in expected.items() for entry_id in ids}

    found = odd(changes, ensemble=ensemble, write_quorum=write_quorum)

    assert found == {bookie: EntryRuns(sorted(ids)) for bookie, ids in expected.items()}, seed
