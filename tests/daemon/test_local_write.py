"""The ledgers that ``bookmender local write`` writes."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec.structs
import pytest
from click.testing import CliRunner

from daemon.cli import local as commands
from daemon.cli.local import local
from daemon.local.spec import ClusterSpec
from daemon.local.status import status_of
from daemon.local.writing import (
    OPEN_SIZE,
    Workload,
    Written,
    shapes_to_try,
    what_was_written,
)
from ledgers.errors import NotEnoughBookiesError, UnavailableError
from ledgers.registration import Registration
from tests.replication.cluster import Cluster, in_virtual_time
from tests.replication.ledger_values import BOOKIES
from tests.replication.nodes import ROOT


@pytest.mark.parametrize("bookie_count", [3, 4, 5])
def test_each_ledger_leaves_a_bookie_free_for_a_replacement(
    bookie_count: int,
) -> None:
    made = shapes_to_try(40, open_count=3, bookie_count=bookie_count)

    assert len(made) == 40
    assert all(2 <= shape.write_quorum <= shape.ensemble_size < bookie_count for shape in made)


def test_the_requested_number_of_ledgers_is_left_open() -> None:
    """The open ledgers have entries and different quorums."""
    made = shapes_to_try(100, open_count=6, bookie_count=5)

    left_open = [shape for shape in made if shape.is_left_open]
    assert left_open == made[-6:]
    assert {(shape.entry_bytes, shape.entry_count) for shape in left_open} == {OPEN_SIZE}
    assert {shape.write_quorum > shape.ack_quorum for shape in left_open} == {True, False}
    assert all(shape.ack_quorum > 1 for shape in left_open), "each can be recovered after a loss"


def test_by_default_no_ledger_is_left_open() -> None:
    made = shapes_to_try(100, open_count=0, bookie_count=5)

    assert not any(shape.is_left_open for shape in made)


def test_too_few_bookies_get_no_ledgers() -> None:
    with pytest.raises(NotEnoughBookiesError, match="three writable"):
        shapes_to_try(1, open_count=1, bookie_count=2)


def test_more_open_ledgers_than_ledgers_are_wrong_usage(tmp_path: Path) -> None:
    refused = CliRunner().invoke(
        local, ["write", "--ledgers", "2", "--open", "3", "--data", str(tmp_path)]
    )

    assert refused.exit_code == 2
    assert "--open 3 is more than --ledgers 2" in refused.stderr


# --- Early ends -----------------------------------------------------------------------------------

SPEC = ClusterSpec(zookeeper_port=20_001, bookie_ports=(20_002, 20_003, 20_004))
RUNNING = msgspec.structs.replace(status_of(SPEC, Path("here")), is_running=True)


async def workload_on(cluster: Cluster) -> Workload:
    return Workload(
        manager=cluster.manager,
        registration=Registration(cluster.store, ROOT),
        bookies=cluster.bookies,
        clock=cluster.clock,
        rng=random.Random(1),
    )


@in_virtual_time
async def test_a_lack_of_bookies_ends_the_writing() -> None:
    """All ledgers that were created are known, closed or not."""
    cluster = await Cluster.start(*BOOKIES[:3])
    workload = await workload_on(cluster)
    await workload.write(2, open_count=0)
    for bookie in BOOKIES[:2]:
        cluster.bookie(bookie).is_down = True  # it stays registered until its session expires

    with pytest.raises(NotEnoughBookiesError, match="no bookie is left to take over"):
        await workload.write(12, open_count=0)

    stored = {i async for ids in cluster.manager.ledger_ids() for i in ids}
    assert stored <= {each.ledger_id for each in workload.written}
    assert {each.is_closed for each in workload.written} == {True, False}


def written(ledger_id: int, *, is_closed: bool, is_left_open: bool = False) -> Written:
    (shape,) = shapes_to_try(1, open_count=int(is_left_open), bookie_count=3)
    shape = replace(shape, entry_count=5)
    return Written(shape=shape, ledger_id=ledger_id, acknowledged=5, is_closed=is_closed)


def ending_with(error: BaseException, *begun: Written) -> Callable[..., None]:
    def write(uri: str, ledger_count: int, *, written: list[Written], open_count: int) -> None:
        written += begun
        raise error

    return write


@pytest.mark.parametrize(
    ("begun", "said"),
    [
        pytest.param([], ["interrupted; nothing was written"], id="at once"),
        pytest.param(
            [written(1, is_closed=True), written(3, is_closed=False), written(2, is_closed=False)],
            [
                "interrupted; wrote 1 of 100 ledgers, 5 entries: they stay",
                "left open without a writer: ledger 2, 3, unless it was not created; "
                "`bookmender ledger close ID --force --yes` closes one at its end",
            ],
            id="while it writes",
        ),
    ],
)
def test_an_interruption_says_what_was_written(
    monkeypatch: pytest.MonkeyPatch, begun: list[Written], said: list[str]
) -> None:
    monkeypatch.setattr(commands, "_status", lambda data: RUNNING)
    monkeypatch.setattr(commands, "write_ledgers", ending_with(KeyboardInterrupt(), *begun))

    told = CliRunner().invoke(local, ["write"]).stderr

    assert told.split("\n")[: len(said)] == said


def test_a_failure_says_what_was_written_and_what_helps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(commands, "_status", lambda data: RUNNING)
    error = NotEnoughBookiesError("no bookie is left")
    monkeypatch.setattr(commands, "write_ledgers", ending_with(error, written(1, is_closed=True)))

    ended = CliRunner().invoke(local, ["write", "--ledgers", "2"])

    assert ended.stderr == "stopped; wrote 1 of 2 ledgers, 5 entries: they stay\n"
    assert isinstance(ended.exception, UnavailableError)  # exit code 3
    assert "no bookie is left; `bookmender local status` shows" in str(ended.exception)


def test_a_complete_run_is_summarised() -> None:
    done = [written(1, is_closed=True), written(2, is_closed=False, is_left_open=True)]

    assert what_was_written(done, ledger_count=2) == [
        "wrote 2 ledgers, 10 entries",
        "left open without a writer: ledger 2",
    ]
