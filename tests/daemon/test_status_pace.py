"""The pace of copies in ``bookmender status``, and its reason."""

import pytest

from daemon.limits import limits_in_force
from daemon.settings import Settings
from daemon.status.gathering import gather_status
from daemon.status.pace import CopyingPace, copying_pace, pace_text
from daemon.status.report import to_json, to_text
from replication.client_activity import ClientActivity
from replication.nodes import Role
from replication.orders import LimitsOrder
from tests.daemon.status_values import HEALTHY, changed, node
from tests.daemon.visits import visiting
from tests.replication.cluster import Cluster, in_virtual_time
from tests.replication.ledger_values import B1, B2, B3, BOOKIES
from tests.replication.nodes import PATHS

SETTINGS = Settings(metadata_service_uri="zk://127.0.0.1/ledgers")
ALL = (B1, B2, B3)


def pace(said: ClientActivity | None, **ordered: int | bool) -> CopyingPace:
    limits = limits_in_force(LimitsOrder(**ordered), SETTINGS)  # type: ignore[arg-type]
    return copying_pace(limits, said, ALL)


@pytest.mark.parametrize(
    ("said", "ordered", "text"),
    [
        pytest.param(
            ClientActivity(quiet=frozenset(ALL)), {}, "full speed: no client is active", id="quiet"
        ),
        pytest.param(
            ClientActivity(active=frozenset({B1, B2}), quiet=frozenset({B3})),
            {},
            f"yielding at 2 bookies with active clients ({B1}, {B2}); full speed at the others",
            id="some active",
        ),
        pytest.param(
            ClientActivity(active=frozenset({B1}), quiet=frozenset({B3})),
            {},
            f"yielding at 1 bookie with active clients ({B1}), and at 1 bookie whose clients are "
            "unknown; full speed at the others",
            id="one unknown",
        ),
        pytest.param(
            ClientActivity(active=frozenset(ALL)),
            {},
            f"yielding at 3 bookies with active clients ({B1}, {B2}, {B3})",
            id="all active",
        ),
        pytest.param(
            None,
            {},
            "yielding at all bookies: the leader has not published client activity",
            id="no record",
        ),
        pytest.param(
            ClientActivity(active=frozenset(ALL)),
            {"yields_to_writers": False},
            "full speed: yielding to clients is switched off (bookmender limits)",
            id="clients have no priority",
        ),
        pytest.param(
            ClientActivity(quiet=frozenset(ALL)),
            {"bytes_per_s": 20_000_000, "entries_per_s": 500},
            "full speed: no client is active; each node copies 500 entries/s and 20,000,000 "
            "bytes/s at most",
            id="limits",
        ),
    ],
)
def test_the_pace_is_shown_with_its_reason(
    said: ClientActivity | None, ordered: dict[str, int | bool], text: str
) -> None:
    assert pace_text(pace(said, **ordered)) == text


def test_absent_bookies_do_not_count() -> None:
    said = ClientActivity(active=frozenset({B1}), quiet=frozenset({B2, B3}))

    found = copying_pace(limits_in_force(LimitsOrder(), SETTINGS), said, (B2, B3))

    assert found.is_full_speed


@pytest.mark.parametrize(
    ("changes", "is_told"),
    [
        ({"marked_count": 1, "nodes": (node("host-a", 11, Role.WORKER),)}, True),
        (
            {"marked_count": 1, "is_disabled": True, "nodes": (node("host-a", 11, Role.WORKER),)},
            False,
        ),
        ({"marked_count": 1}, False),
        ({"nodes": (node("host-a", 11, Role.WORKER),)}, False),
    ],
    ids=["our workers repair", "they are disabled", "no worker of ours", "nothing to do"],
)
def test_the_pace_is_shown_while_our_nodes_repair(
    changes: dict[str, object], is_told: bool
) -> None:
    assert ("pace: yielding" in to_text(changed(HEALTHY, **changes))) is is_told


@in_virtual_time
async def test_the_pace_is_gathered() -> None:
    cluster = await Cluster.start()
    said = ClientActivity(
        active=frozenset({B1}), quiet=frozenset(BOOKIES) - {B1, B2}, copying_node_count=4
    )
    await cluster.store.create(PATHS.activity, said.to_json(), with_parents=True)

    status = await gather_status(visiting(cluster), clock=cluster.clock)

    assert to_json(status)["copying"] == {
        "speed": "yielding",
        "yields_to_writers": True,
        "is_client_activity_known": True,
        "active_bookies": [B1],
        "unknown_bookies": [B2],
        "copying_nodes": 4,
        "bytes_per_s": 0,
        "entries_per_s": 0,
    }
