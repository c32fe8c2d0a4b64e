"""Observe mode plans repairs for the ledgers that workers would lease now."""

from collections.abc import Sequence
from typing import Any

import pytest

from auditor.mark_reasons import PrivateQueue
from auditor.observer import Difference
from auditor.underreplication import UnderreplicatedLedger
from replication.orders import HoldOrder
from tests.daemon.test_observe import seeing
from tests.replication.ledger_values import B1

HELD = {"hold": HoldOrder(since_ms=1), "is_hold_ordered": True}


def lost(*ledger_ids: int) -> tuple[UnderreplicatedLedger, ...]:
    return tuple(
        UnderreplicatedLedger(ledger_id=i, lost=(B1,), copies_left=2, length=1) for i in ledger_ids
    )


@pytest.mark.parametrize(
    ("state", "planned"),
    [
        pytest.param({}, [3, 1, 2, 9, 20, 21], id="all that are or would be marked"),
        pytest.param(HELD, [3, 2, 9, 20, 21], id="safety hold: those that are marked"),
        pytest.param({"is_disabled": True}, [], id="disabled: none"),
        pytest.param(HELD | {"is_disabled": True}, [], id="disabled during a safety hold: none"),
    ],
)
def test_what_workers_would_lease_is_planned(state: dict[str, Any], planned: Sequence[int]) -> None:
    difference = Difference(agreed_count=1, unmarked=(1,), partly_marked=(2,), surplus=(9,))
    private = PrivateQueue(damaged=(20,), others=(21,))

    sight = seeing(underreplicated=lost(3, 1, 2), difference=difference, private=private, **state)

    assert sight.observation.would_repair == planned
