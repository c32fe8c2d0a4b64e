"""What ``bookmender local write`` writes."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from daemon.demo import scenario
from daemon.demo.workload import OPEN_SIZE, Ending, Workload, Written, shapes_to_try
from daemon.local import commands, views
from daemon.local.commands import local
from daemon.local.spec import ClusterSpec
from daemon.local.status import ClusterStatus, at_rest
from ledgers.errors import NotEnoughBookiesError, UnavailableError
from ledgers.registration import Registration
from tests.replication.cluster import Cluster, in_virtual_time
from tests.replication.ledger_values import BOOKIES
from tests.replication.nodes import ROOT


@pytest.mark.parametrize("bookie_count", [3, 4, 5])
def test_each_ledger_survives_the_loss_of_a_bookie_with_one_left_to_take_over(
    bookie_count: int,
) -> None:
    made = shapes_to_try(40, open_count=3, bookie_count=bookie_count)

    assert len(made) == 40
    assert all(2 <= shape.write_quorum <= shape.ensemble_size < bookie_count for shape in made)


def test_as_many_are_left_open_as_are_asked_for_with_entries_whatever_their_quorums() -> None:
    made = shapes_to_try(100, open_count=6, bookie_count=5)

    left_open = [shape for shape in made if shape.ending is not Ending.CLOSED]
    assert left_open == made[-6:]
    assert {shape.ending for shape in left_open} == {Ending.ABANDONED}
    assert {(shape.entry_bytes, shape.entry_count) for shape in left_open} == {OPEN_SIZE}
    assert {shape.write_quorum > shape.ack_quorum for shape in left_open} == {True, False}


def test_unless_some_are_asked_for_none_is() -> None:
    made = shapes_to_try(100, open_count=0, bookie_count=5)

    assert {shape.ending for shape in made} == {Ending.CLOSED}


def test_too_few_bookies_are_no_place_to_try_anything() -> None:
    assert shapes_to_try(1, open_count=1, bookie_count=2) == []


def test_more_open_ones_than_there_are_is_a_wrong_call(tmp_path: Path) -> None:
    refused = CliRunner().invoke(
        local, ["write", "--ledgers", "2", "--open", "3", "--data", str(tmp_path)]
    )

    assert refused.exit_code == 2
    assert "--open 3 is more than --ledgers 2" in refused.stderr


# --- What ends it early ---------------------------------------------------------------------------

SPEC = ClusterSpec(zookeeper_port=20_001, bookie_ports=(20_002, 20_003, 20_004))
RUNNING = replace(at_rest(SPEC, data="here"), is_running=True)


def with_bookies(*states: str) -> ClusterStatus:
    pairs = zip(RUNNING.bookies, states, strict=False)
    return replace(RUNNING, bookies=tuple(replace(b, state=state) for b, state in pairs))


async def workload_on(cluster: Cluster) -> Workload:
    return Workload(
        manager=cluster.manager,
        registration=Registration(cluster.store, ROOT),
        bookies=cluster.bookies,
        clock=cluster.clock,
        rng=random.Random(1),
    )


@in_virtual_time
async def test_bookies_that_run_out_end_it_with_that_error_and_what_was_begun_is_known() -> None:
    cluster = await Cluster.start(*BOOKIES[:3])
    workload = await workload_on(cluster)
    await workload.write(shapes_to_try(2, open_count=0, bookie_count=3))
    cluster.bookie(BOOKIES[0]).is_down = True  # ZooKeeper lists it until its session has expired

    with pytest.raises(NotEnoughBookiesError, match="no bookie is left to take over"):
        await workload.write(shapes_to_try(12, open_count=0, bookie_count=3))
    await workload.look_again()

    there = {each.ledger_id: each.is_closed for each in workload.written}
    stored = [i async for ids in cluster.manager.ledger_ids() for i in ids]
    assert there == {i: (await cluster.manager.read(i)).metadata.is_closed for i in stored}
    assert set(there.values()) == {True, False}


def written(ledger_id: int, *, is_closed: bool, ending: Ending = Ending.CLOSED) -> Written:
    shape = replace(shapes_to_try(1, open_count=0, bookie_count=3)[0], ending=ending, entry_count=5)
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
                "left open, as by a writer that died: ledger 2, 3; "
                "`bookmender ledger close ID --force --yes` closes one where it ends",
            ],
            id="in the midst of it",
        ),
    ],
)
def test_who_interrupts_it_is_told_what_there_is_and_how_to_go_on(
    monkeypatch: pytest.MonkeyPatch, begun: list[Written], said: list[str]
) -> None:
    monkeypatch.setattr(commands, "_status", lambda data: RUNNING)
    monkeypatch.setattr(scenario, "write_ledgers", ending_with(KeyboardInterrupt(), *begun))

    told = CliRunner().invoke(local, ["write"]).stderr

    assert told.split("\n")[: len(said)] == said


def test_where_bookies_fail_it_says_what_was_written_why_it_ended_and_what_helps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    status = with_bookies("writable", "down", "writable")
    monkeypatch.setattr(commands, "_status", lambda data: status)
    error = NotEnoughBookiesError("no bookie is left")
    monkeypatch.setattr(scenario, "write_ledgers", ending_with(error, written(1, is_closed=True)))

    ended = CliRunner().invoke(local, ["write", "--ledgers", "2"])

    assert ended.stderr == "stopped; wrote 1 of 2 ledgers, 5 entries: they stay\n"
    assert isinstance(ended.exception, UnavailableError)  # exit code 3
    assert str(ended.exception).startswith("no bookie is left; 127.0.0.1:20003 is down: ")


@pytest.mark.parametrize(
    ("status", "helps"),
    [
        pytest.param(
            with_bookies("writable", "down", "writable"),
            "127.0.0.1:20003 is down: `bookmender local start 2 --data x` brings it back",
            id="one is down",
        ),
        pytest.param(
            with_bookies("down", "down", "writable"),
            "127.0.0.1:20002 is down, like 1 more: `bookmender local start 1 --data x`",
            id="two are down",
        ),
        pytest.param(
            with_bookies("writable", "writable"),
            "`bookmender local down --data x`, then `bookmender local up --data x --bookies 3`",
            id="too few of them",
        ),
        pytest.param(
            with_bookies("writable", "read-only", "unregistered"),
            "`bookmender local status --data x` shows each bookie's state",
            id="not all take writes",
        ),
        pytest.param(
            at_rest(SPEC, data="x"), "stopped: `bookmender local up --data x`", id="it has ended"
        ),
    ],
)
def test_what_helps_depends_on_how_the_bookies_are(status: ClusterStatus, helps: str) -> None:
    assert helps in views.way_on(status, data_option=" --data x")


def test_all_that_was_wanted_is_told_in_short() -> None:
    done = [written(1, is_closed=True), written(2, is_closed=False, ending=Ending.ABANDONED)]

    assert scenario.what_was_written(done, ledger_count=2) == [
        "wrote 2 ledgers, 10 entries",
        "left open, as by a writer that died: ledger 2",
    ]
