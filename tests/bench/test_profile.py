"""The groups to which a daemon's CPU time is charged."""

from pathlib import Path

import pytest

from bench.profile import REPOSITORY, by_function, by_group, load_samples
from bench.sampled import Sample
from bench.writer import Latency, percentile

SITE = "/somewhere/lib/python3.11/site-packages"
STANDARD = "/somewhere/lib/python3.11"


def sample(*stack: str, cpu_s: float = 1.0, at_s: float = 0.0) -> Sample:
    return Sample(at_s=at_s, cpu_s=cpu_s, stack=stack)


@pytest.mark.parametrize(
    ("stack", "group"),
    [
        pytest.param([f"{REPOSITORY}/ledgers/bulk/source.py:f"], "bulk path", id="by its folder"),
        pytest.param(
            [f"{REPOSITORY}/ledgers/client.py:f"], "bookie client", id="the nearest folder"
        ),
        pytest.param([f"{SITE}/kazoo/client.py:f"], "ZooKeeper client", id="a library of ours"),
        pytest.param(
            [f"{STANDARD}/dataclasses.py:replace", f"{REPOSITORY}/replication/planning/plan.py:f"],
            "planning, checks",
            id="the standard library counts for its caller",
        ),
        pytest.param(
            [f"{STANDARD}/asyncio/events.py:Handle._run", f"{REPOSITORY}/daemon/node.py:f"],
            "tasks, event loop",
            id="but the event loop for itself",
        ),
        pytest.param([f"{STANDARD}/threading.py:run"], "the rest", id="no group"),
    ],
)
def test_cpu_time_is_charged_to_the_innermost_group(stack: list[str], group: str) -> None:
    assert by_group([sample(*stack)]) == {group: 1.0}


def test_functions_are_named_from_their_package_on() -> None:
    samples = [sample(f"{REPOSITORY}/ledgers/digest.py:f"), sample(f"{SITE}/kazoo/client.py:g")]

    assert set(by_function(samples)) == {"ledgers/digest.py:f", "kazoo/client.py:g"}


def test_only_the_time_of_the_repair_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "samples.json"
    path.write_text('[[1.0, 0.5, ["a"]], [2.0, 0.5, ["b"]], [3.0, 0.5, ["c"]]]')

    assert [each.stack for each in load_samples(path, begin_s=1.5, end_s=2.5)] == [("b",)]


def test_a_waiting_thread_does_not_show_where_it_was_busy(tmp_path: Path) -> None:
    path = tmp_path / "samples.json"
    path.write_text('[[1.0, 0.5, ["selectors.py:EpollSelector.select"]], [1.0, 0.5, ["x.py:f"]]]')

    assert [each.stack for each in load_samples(path, begin_s=0, end_s=2)] == [("x.py:f",)]


@pytest.mark.parametrize(
    ("share", "value"),
    [
        pytest.param(0.5, 50.0, id="the median"),
        pytest.param(0.99, 99.0, id="99 of 100 are no greater"),
        pytest.param(1.0, 100.0, id="the worst"),
    ],
)
def test_percentiles_are_values_that_occurred(share: float, value: float) -> None:
    assert percentile([float(each) for each in range(1, 101)], share) == value


def test_latencies_are_sorted_first() -> None:
    latency = Latency.of([3.0, 1.0, 2.0])

    assert (latency.adds, latency.p50_ms, latency.p99_ms) == (3, 2.0, 3.0)
