"""The conditions as metrics of the leader."""

import math
from collections.abc import Iterator

import pytest
from prometheus_client import REGISTRY

from daemon.http.condition_metrics import SUBJECTS_MAX, publish
from daemon.status.conditions import conditions
from ledgers.model import BookieId
from replication.orders import Mute
from tests.daemon.status_values import HEALTHY, changed
from tests.replication.ledger_values import B1, B2


def published() -> list[tuple[str, str, str]]:
    (metric,) = [m for m in REGISTRY.collect() if m.name == "bookmender_condition"]
    return [(s.labels["code"], s.labels["severity"], s.labels["subject"]) for s in metric.samples]


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    yield
    publish((), read_s=math.nan)


def test_each_lost_bookie_is_named_and_a_muted_condition_is_not_published() -> None:
    mute = Mute(since_ms=0, until_ms=9, severity="WARN")
    status = changed(HEALTHY, lost=(B1, B2), leader=None, is_disabled=True)

    publish(conditions(status), read_s=1)
    before = published()
    publish(conditions(changed(status, mutes={"BOOKIES_LOST": mute})), read_s=1)

    assert before[:2] == [("BOOKIES_LOST", "WARN", B1), ("BOOKIES_LOST", "WARN", B2)]
    assert ("AUTORECOVERY_DISABLED", "WARN", "") in before
    assert "BOOKIES_LOST" not in [code for code, *_ in published()]


def test_a_mass_failure_makes_few_metrics() -> None:
    many = tuple(BookieId(f"b{number}:3181") for number in range(300))
    publish(conditions(changed(HEALTHY, lost=many)), read_s=1)

    assert len([code for code, *_ in published() if code == "BOOKIES_LOST"]) == SUBJECTS_MAX
