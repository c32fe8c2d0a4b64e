"""The options of a run: bounded, and able to reach executors."""

import pickle

import pytest

from auditor.fsck.options import FsckOptions, Level
from ledgers.errors import SettingsError
from ledgers.placement import RackRule
from ledgers.secret import Secret
from tests.fsck.inspections import options
from tests.replication.ledger_values import B1


def test_options_survive_pickling() -> None:
    wanted = options(
        rule=RackRule(min_racks=2, is_enforced=True), racks={B1: "/a"}, default_password=Secret("x")
    )

    assert pickle.loads(pickle.dumps(wanted)) == wanted


def test_each_level_has_a_greater_depth() -> None:
    assert [level.depth for level in Level] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "changes",
    [
        {"sample_share": 0.0},
        {"sample_share": 1.1},
        {"reads_in_flight_per_bookie": 0},
        {"reads_in_flight_per_bookie": 501},
        {"ledgers_at_once": 0},
    ],
)
def test_options_out_of_range_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(SettingsError):
        FsckOptions(metadata_service_uri="zk://127.0.0.1/ledgers", **changes)  # type: ignore[arg-type]
