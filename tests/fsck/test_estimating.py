"""The work of reading a ledger, estimated from its metadata."""

from dataclasses import replace

import pytest

from auditor.fsck import ledger_list
from auditor.fsck.ledger_list import (
    COPY_BYTES,
    LEDGER_WORK_MIN,
    estimate_work,
    list_ledger_ids,
    work_of,
)
from auditor.fsck.options import FsckOptions, Level
from ledgers.errors import UnauthorizedError
from ledgers.model import LedgerMetadata, LedgerState, Segment
from tests.fsck.inspections import ALL, let_in, options
from tests.replication.cluster import Cluster, in_virtual_time, shut_out
from tests.replication.nodes import ROOT

OPEN = LedgerMetadata(
    ensemble_size=3,
    write_quorum=2,
    ack_quorum=2,
    segments=(
        Segment(first_entry_id=0, ensemble=ALL[:3]),
        Segment(first_entry_id=400, ensemble=ALL[:3]),
    ),
)
CLOSED = replace(OPEN, state=LedgerState.CLOSED, last_entry_id=999)
LARGE = replace(CLOSED, length=1_000 * 9 * COPY_BYTES)
EMPTY = replace(CLOSED, last_entry_id=-1, segments=OPEN.segments[:1])


@pytest.mark.parametrize(
    ("metadata", "level", "weight"),
    [
        pytest.param(CLOSED, Level.FULL, 2 * 1_000 + 8, id="each copy, and the ends of fragments"),
        pytest.param(CLOSED, Level.SAMPLE, 2 * 100 + 8, id="a share of them"),
        pytest.param(LARGE, Level.FULL, 2 * 10_000 + 8, id="large entries take their time"),
        pytest.param(OPEN, Level.FULL, 2 * 400 + 8, id="as far as it is known to be written"),
        pytest.param(EMPTY, Level.FULL, 4, id="a ledger without entries"),
    ],
)
def test_the_weight_of_a_ledger_is_the_work_of_reading_it(
    metadata: LedgerMetadata, level: Level, weight: int
) -> None:
    wanted = FsckOptions(metadata_service_uri="zk://a/ledgers", level=level, sample_share=0.1)

    assert work_of(metadata, wanted) == weight


@in_virtual_time
async def test_a_hidden_directory_does_not_stop_the_listing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = await Cluster.start()
    let_in(monkeypatch, ledger_list, cluster)
    for ledger_id in (1, 10_000):
        await cluster.write_ledger(ALL, ledger_id=ledger_id, write_quorum=3)
    shut_out(cluster.store, f"{ROOT}/00/0000")
    hidden: list[UnauthorizedError] = []

    listed = await list_ledger_ids(options(), on_hidden=hidden.append)

    assert list(listed) == [10_000]
    assert [each.context["path"] for each in hidden] == [f"{ROOT}/00/0000"]


@in_virtual_time
async def test_deleted_and_unreadable_ledgers_weigh_least(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = await Cluster.start()
    let_in(monkeypatch, ledger_list, cluster)
    for ledger_id in (1, 3, 4):
        await cluster.write_ledger(ALL, ledger_id=ledger_id, write_quorum=3)
    await cluster.store.set(cluster.manager.path(3), b"no metadata", version=0)
    shut_out(cluster.store, cluster.manager.path(4))
    counts: list[int] = []

    weights = await estimate_work(options(), [1, 2, 3, 4], counts.append)

    assert weights[0] > LEDGER_WORK_MIN
    assert list(weights[1:]) == [LEDGER_WORK_MIN, LEDGER_WORK_MIN, LEDGER_WORK_MIN]
    assert counts == [4]
