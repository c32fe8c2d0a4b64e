"""Limits at bookies with active, inactive or unknown clients: the decision, and its effects."""

import pytest

from ledgers.bulk.flow_control import (
    SHARED_ADDS_PER_S,
    SHARED_BYTES_PER_S,
    SHARED_SINGLE_READS_PER_S,
    Activity,
    ActivityOf,
    FlowControl,
    flow_limits,
)
from ledgers.model import BookieId
from tests.replication.cluster import in_virtual_time

A, B = BookieId("a:3181"), BookieId("b:3181")


def everywhere(activity: Activity) -> ActivityOf:
    return lambda bookie: activity


# --- The decision ---------------------------------------------------------------------------------


@pytest.mark.parametrize("sharer_count", [1, 100])
def test_without_an_active_client_there_is_no_rate_limit(sharer_count: int) -> None:
    limits = flow_limits(Activity.QUIET, yields=True, sharer_count=sharer_count)

    assert limits.is_full_speed
    assert (limits.reads_per_s, limits.single_reads_per_s, limits.adds_per_s) == (0, 0, 0)
    assert not limits.is_by_reply_times


@pytest.mark.parametrize("activity", Activity)
def test_without_priority_of_clients_nothing_is_limited(activity: Activity) -> None:
    assert flow_limits(activity, yields=False, sharer_count=3).is_full_speed


@pytest.mark.parametrize("activity", [Activity.ACTIVE, Activity.UNKNOWN])
def test_nodes_share_the_rate_where_clients_may_be_active(activity: Activity) -> None:
    limits = flow_limits(activity, yields=True, sharer_count=10)

    assert limits.adds_per_s == SHARED_ADDS_PER_S // 10
    assert limits.single_reads_per_s == SHARED_SINGLE_READS_PER_S // 10
    assert limits.bytes_per_s == SHARED_BYTES_PER_S // 10
    assert limits.is_by_reply_times


def test_no_number_of_nodes_makes_a_rate_of_zero() -> None:
    """It would mean no limit."""
    assert flow_limits(Activity.ACTIVE, yields=True, sharer_count=10**9).adds_per_s == 1


@in_virtual_time
async def test_a_bookie_without_a_recent_record_is_unknown() -> None:
    flow = FlowControl()
    assert flow.of(A).limits == flow_limits(Activity.UNKNOWN, yields=True, sharer_count=1)

    flow.set_activity(
        lambda bookie: Activity.QUIET if bookie == A else Activity.ACTIVE, sharer_count=2
    )
    assert flow.of(A).limits.is_full_speed
    assert not flow.of(B).limits.is_full_speed
    assert flow.is_yielding

    flow.set_activity(None, sharer_count=2)
    assert flow.of(A).limits == flow_limits(Activity.UNKNOWN, yields=True, sharer_count=2)
    flow.close()


@in_virtual_time
async def test_users_are_told_when_limits_change_and_only_then() -> None:
    flow, told = FlowControl(), []
    flow.of(A).listeners.append(lambda: told.append(flow.of(A).limits))

    flow.set_activity(everywhere(Activity.ACTIVE), sharer_count=1)  # as good as unknown
    assert told == []
    flow.yields = False

    assert told == [flow_limits(Activity.ACTIVE, yields=False, sharer_count=1)]
    flow.close()
