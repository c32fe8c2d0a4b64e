"""What is told where several things are in the way of one ledger."""

import pytest

from replication.reasons import Blocked, Reason, gravest

AWAY = Blocked(reason=Reason.MAINTENANCE, detail="away", until_ms=5)
NOBODY = Blocked(reason=Reason.NO_TARGET, detail="nobody", until_ms=9)
LOST = Blocked(reason=Reason.NO_COPY, detail="lost")


@pytest.mark.parametrize(
    ("blocked", "told"),
    [
        pytest.param(
            [AWAY, NOBODY],
            Blocked(
                reason=Reason.NO_TARGET,
                detail="nobody; away",
                until_ms=5,
                besides=frozenset({Reason.MAINTENANCE}),
            ),
            id="what needs help, before what time will help",
        ),
        pytest.param(
            [AWAY, NOBODY, LOST, NOBODY],
            Blocked(
                reason=Reason.NO_COPY,
                detail="lost; nobody; away",
                besides=frozenset({Reason.NO_TARGET, Reason.MAINTENANCE}),
            ),
            id="that entries have no copy, before all else",
        ),
        pytest.param([LOST, LOST], LOST, id="what is said twice, once"),
    ],
)
def test_the_gravest_comes_first(blocked: list[Blocked], told: Blocked) -> None:
    assert gravest(blocked) == told
