"""One reason is reported if several block a ledger."""

import pytest
from msgspec.structs import replace

from replication.reasons import SAME_REASON_MAX, Blocked, Facts, Reason, gravest
from tests.replication.ledger_values import B1, B2

AWAY = Blocked(reason=Reason.MAINTENANCE, facts=Facts(in_maintenance=(B1,)), until_ms=5)
NOBODY = Blocked(reason=Reason.NO_TARGET, facts=Facts(replaced=B2), until_ms=9)
LOST = Blocked(reason=Reason.NO_COPY, facts=Facts(entry_ids=(4,), entry_count=1))


@pytest.mark.parametrize(
    ("blocked", "combined"),
    [
        pytest.param(
            [AWAY, NOBODY],
            replace(NOBODY, until_ms=5, besides=(AWAY,)),
            id="reasons that need help, before those that time removes",
        ),
        pytest.param(
            [AWAY, NOBODY, LOST, NOBODY],
            replace(LOST, besides=(NOBODY, AWAY)),
            id="that entries have no copy, before all else",
        ),
        pytest.param([LOST, LOST], LOST, id="equal ones once"),
    ],
)
def test_the_most_serious_reason_comes_first(blocked: list[Blocked], combined: Blocked) -> None:
    assert gravest(blocked) == combined


def test_some_of_many_blocked_for_one_reason_are_kept() -> None:
    """Other reasons are kept as well."""
    many = [
        Blocked(reason=Reason.MISPLACED, facts=Facts(entry_ids=(entry_id,)))
        for entry_id in range(100)
    ]

    reasons = gravest([AWAY, *many]).all_reasons

    assert reasons == (*[Reason.MISPLACED] * SAME_REASON_MAX, Reason.MAINTENANCE)


@pytest.mark.parametrize("reason", Reason, ids=lambda reason: reason.value)
def test_each_reason_says_whether_time_alone_helps(reason: Reason) -> None:
    assert isinstance(reason.needs_help, bool)
