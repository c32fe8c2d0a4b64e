"""Lists of entries as bookies encode them."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ledgers.errors import CorruptionError
from ledgers.wire.messages import RUN_COUNT_MAX, decode_availability
from tests.vectors import Case, cases

Group = tuple[int, int, int, int]
"""First start, last start, run size, period."""


def encode(*groups: Group, version: int = 0, group_count: int | None = None) -> bytes:
    header = struct.pack(">ii56x", version, len(groups) if group_count is None else group_count)
    return header + b"".join(struct.pack(">qqii", *group) for group in groups)


@pytest.mark.parametrize(
    "case", cases("availability"), ids=lambda case: str(case["entry_ids"])[:40]
)
def test_the_entries_are_those_that_java_reads(case: Case) -> None:
    runs = decode_availability(bytes.fromhex(case["bytes"]))

    assert [entry_id for run in runs for entry_id in run] == sorted(case["entry_ids"])
    assert all(run.step == 1 and run for run in runs)


@given(entry_ids=st.sets(st.integers(0, 2**63 - 1)))
def test_one_group_for_each_entry_lists_them_all(entry_ids: set[int]) -> None:
    payload = encode(*((entry_id, entry_id, 1, 0) for entry_id in sorted(entry_ids)))

    assert {e for run in decode_availability(payload) for e in run} == entry_ids


@pytest.mark.parametrize(
    "payload",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(encode()[:-1], id="header cut short"),
        pytest.param(encode(version=1), id="a later version"),
        pytest.param(encode((0, 0, 1, 0))[:-1], id="group cut short"),
        pytest.param(encode((0, 0, 1, 0), group_count=2), id="fewer groups than announced"),
        pytest.param(encode((0, 0, 1, 0), group_count=0), id="more groups than announced"),
        pytest.param(encode(group_count=-1), id="negative number of groups"),
        pytest.param(encode((-1, -1, 1, 0)), id="negative entry id"),
        pytest.param(encode((0, 0, 0, 0)), id="empty run"),
        pytest.param(encode((5, 4, 1, 1)), id="last start before the first"),
        pytest.param(encode((0, 4, 1, 0)), id="a period of zero"),
        pytest.param(encode((0, 4, 3, 2)), id="runs that overlap"),
        pytest.param(encode((5, 5, 1, 0), (0, 0, 1, 0)), id="groups out of order"),
        pytest.param(encode((0, 2**62, 1, 1)), id="more runs than fit into memory"),
        pytest.param(encode((0, 2**63 - 1, 1, 1)), id="more runs than a range can count"),
        pytest.param(encode((0, RUN_COUNT_MAX * 2, 1, 2)), id="one run above the limit"),
    ],
)
def test_a_malformed_list_is_corruption(payload: bytes) -> None:
    with pytest.raises(CorruptionError):
        decode_availability(payload)
