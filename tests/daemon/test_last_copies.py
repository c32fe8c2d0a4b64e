"""Ledgers that would lose their last available copies to a maintenance window."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from click.testing import Result

from auditor.absence import WRITE_S
from auditor.ledger_map_updater import LedgerMapRecord
from daemon.cli.bookie import maintain
from daemon.operations import maintenance as last_copies
from daemon.operations.bookies import known_bookies
from daemon.operations.holds import read_hold
from daemon.operations.maintenance import LeftWithout, left_without, open_window, read_windows
from ledgers.clock import Clock, SystemClock
from ledgers.errors import RejectedError
from ledgers.model import BookieId
from replication.orders import MaintenanceWindow
from tests.auditor.auditing import auditing
from tests.auditor.scenes import SOON_S, delayed
from tests.daemon.in_memory import InMemory
from tests.daemon.visits import visiting
from tests.replication.cluster import Cluster, in_virtual_time, shut_out
from tests.replication.ledger_values import B1, B2, B3, B4
from tests.replication.nodes import ROOT

HOUR_S = 3_600
WHY = "all copies of some entries are on absent bookies. Already absent or in maintenance: "


async def with_window(
    *ensembles: Sequence[BookieId], bookie: BookieId = B1, is_absent: bool = True
) -> Cluster:
    cluster = await Cluster.start()
    await prepare(cluster, *ensembles, bookie=bookie, is_absent=is_absent)
    return cluster


async def prepare(
    cluster: Cluster,
    *ensembles: Sequence[BookieId],
    bookie: BookieId = B1,
    is_absent: bool = True,
    clock: Clock | None = None,
) -> None:
    """Create ledgers 0, 1, …, and open a window. ``clock``: the cluster's, if None."""
    for ledger_id, ensemble in enumerate(ensembles):
        await cluster.write_ledger(ensemble, ledger_id=ledger_id)
    here = visiting(cluster)
    await open_window(here, bookie, duration_s=HOUR_S, reason="", clock=clock or cluster.clock)
    if is_absent:
        await cluster.kill(bookie)


async def found(cluster: Cluster, bookie: BookieId = B2) -> LeftWithout | None:
    return await left_without(visiting(cluster), bookie, clock=cluster.clock)


@in_virtual_time
async def test_without_other_absent_bookies_no_ledger_is_read() -> None:
    cluster = await with_window((B1, B2), bookie=B2, is_absent=False)

    assert await found(cluster, B2) is None


@pytest.mark.parametrize(
    "is_absent", [True, False], ids=["absent", "in maintenance, still registered"]
)
@in_virtual_time
async def test_ledgers_with_their_last_copies_on_it_are_counted(is_absent: bool) -> None:
    cluster = await with_window((B1, B2), (B1, B3), (B2, B3), (B1, B2), is_absent=is_absent)

    assert await found(cluster) == LeftWithout(bookie=B2, others=(B1,), count=2, looked_at=4)
    assert await found(cluster, B4) == LeftWithout(bookie=B4, others=(B1,), count=0, looked_at=4)


@in_virtual_time
async def test_an_absent_bookie_without_a_window_counts_too() -> None:
    cluster = await with_window((B1, B2), bookie=B3, is_absent=False)
    await cluster.kill(B1)

    assert await found(cluster) == LeftWithout(bookie=B2, others=(B1, B3), count=1, looked_at=1)


@in_virtual_time
async def test_an_absent_bookie_without_a_cookie_counts_too() -> None:
    """Its host died, and it will be reformatted; the leader still lists the bookie."""
    cluster = await Cluster.start(B1, B2, B3)
    await cluster.write_ledger((B1, B2), ledger_id=0)
    async with auditing(cluster, settings=delayed(HOUR_S)):
        await cluster.kill(B1)
        await cluster.store.delete(f"{ROOT}/cookies/{B1}")
        await asyncio.sleep(2 * WRITE_S)

        assert await found(cluster) == LeftWithout(bookie=B2, others=(B1,), count=1, looked_at=1)
        assert (await read_hold(visiting(cluster), clock=cluster.clock)).absent == [B1]
        assert B1 in await known_bookies(visiting(cluster)), "a window may be opened for it"


@in_virtual_time
async def test_an_absent_bookie_that_no_ledger_names_does_not_count() -> None:
    cluster = await with_window((B1, B2), bookie=B4)
    async with auditing(cluster) as leader:
        session_id = leader.store.session_id
        note = LedgerMapRecord(
            session_id=session_id, written_ms=0, is_complete=True, ledger_count=1
        )
        await leader.records.write(note)
        await asyncio.sleep(SOON_S)

        assert await found(cluster, B2) is None


@in_virtual_time
async def test_an_unreadable_ledger_leaves_the_answer_open() -> None:
    cluster = await with_window((B1, B3), (B2, B3))
    here = visiting(cluster)
    shut_out(here.store, cluster.manager.path(0))

    left = await left_without(here, B2, clock=cluster.clock)

    assert left == LeftWithout(bookie=B2, others=(B1,), count=0, looked_at=1, unreadable_count=1)
    assert not left.is_harmless


@in_virtual_time
async def test_only_the_first_of_many_ledgers_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(last_copies, "LOOK_S", 0.0)
    cluster = await with_window((B1, B3), (B2, B3))

    left = await found(cluster)

    assert left is not None
    assert not left.is_whole
    assert not left.is_harmless


def test_the_warning_has_the_count_of_ledgers() -> None:
    some = LeftWithout(bookie=B2, others=(B1, B3), count=2, looked_at=9, is_whole=False)
    none = replace(some, others=(B1,), count=0)
    unreadable = replace(none, is_whole=True, unreadable_count=3)

    assert f"at least 2 ledgers would be unavailable: {WHY}{B1}, {B3}." in some.to_text()
    assert f"without {B2}, ledgers may be unavailable." in none.to_text()
    assert "Only the first 9 ledgers were checked" in none.to_text()
    assert "The metadata of 3 ledgers cannot be read" in unreadable.to_text()


# --- The command ----------------------------------------------------------------------------------

Invoked = Callable[..., tuple[Result, dict[BookieId, MaintenanceWindow]]]


@pytest.fixture
def invoked(in_memory: InMemory) -> Invoked:
    """Return a function that runs the command for B2 while B1 is in maintenance. It returns the
    result and the open windows."""

    def run_it(*arguments: str, ensemble: Sequence[BookieId] = (B1, B2)) -> tuple[Result, Any]:
        return in_memory(
            maintain,
            *arguments,
            prepare=lambda cluster: prepare(cluster, ensemble, clock=SystemClock()),
            look=lambda cluster: read_windows(visiting(cluster), cluster.clock),
        )

    return run_it


def test_a_window_that_leaves_no_copy_is_refused(invoked: Invoked) -> None:
    result, windows = invoked(B2, "--for", "1h")

    assert isinstance(result.exception, RejectedError)
    assert f"without {B2}, 1 ledger would be unavailable" in str(result.exception)
    assert "To begin the window anyway, give --yes" in str(result.exception)
    assert windows.keys() == {B1}


@pytest.mark.parametrize(
    ("arguments", "ensemble"),
    [
        pytest.param((B2, "--for", "1h", "--yes"), (B1, B2), id="with yes"),
        pytest.param((B2, "--for", "1h"), (B1, B3), id="each entry keeps a copy"),
    ],
)
def test_a_window_begins_with_yes_or_if_it_is_harmless(
    invoked: Invoked, arguments: tuple[str, ...], ensemble: Sequence[BookieId]
) -> None:
    result, windows = invoked(*arguments, ensemble=ensemble)

    assert result.exit_code == 0
    assert windows.keys() == {B1, B2}
    assert "unavailable" not in result.output


def test_yes_without_a_window_is_wrong_usage(invoked: Invoked) -> None:
    assert invoked(B2, "--yes")[0].exit_code == 2
