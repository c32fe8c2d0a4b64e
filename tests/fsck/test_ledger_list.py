"""Ledger ids, cut into even parts and packed."""

from array import array
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from auditor.fsck.ledger_list import pack, unpack

ids = st.sets(st.integers(min_value=0, max_value=2**63 - 1)).map(sorted)


@given(ids)
def test_packed_ids_are_unpacked_unchanged(ledger_ids: Sequence[int]) -> None:
    assert unpack(pack(ledger_ids)) == array("q", ledger_ids)


@pytest.mark.parametrize(
    ("ledger_ids", "bytes_max"),
    [
        pytest.param(range(5_000_000_000, 5_000_010_000), 1_000, id="a dense range"),
        pytest.param(range(0, 30_000, 3), 1_000, id="every third"),
        pytest.param((), 100, id="none"),
    ],
)
def test_close_ids_take_few_bytes(ledger_ids: Sequence[int], bytes_max: int) -> None:
    assert len(pack(ledger_ids)) <= bytes_max
