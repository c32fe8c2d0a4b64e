"""Contenders: the order of their turns, the node of another checkout, and a writer's latencies."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from bench.audit import SIZES
from bench.audit import plan as plan_losses
from bench.contenders import CONTENDERS, JAVA, OURS, other_tree
from bench.loads import LOADS
from bench.repair import ALONE, WRITERS, contenders_for, plan
from bench.writer import latencies, percentile
from daemon.local.processes import Child


def test_every_contender_runs_its_loads_as_often_as_requested() -> None:
    turns = plan(CONTENDERS, list(LOADS), repeat=3, writer_repeat=1)

    records = [record for _, records in turns for record in records]
    alone = [record.labels for record in records if record.labels["pass"] == ALONE]
    met = [(each.name, load) for each in CONTENDERS for load in LOADS]
    assert len({record.key for record in records}) == len(records)
    assert Counter((each["contender"], each["load"]) for each in alone) == Counter(met * 3)
    beside = [each for each in CONTENDERS if each.name in WRITERS]
    assert len(records) - len(alone) == len(beside) * len(LOADS)


def test_the_order_of_contenders_is_reversed_each_time() -> None:
    turns = [each for each, _ in plan(CONTENDERS, ["a"], repeat=2, writer_repeat=0)]

    assert turns == [*CONTENDERS, *reversed(CONTENDERS)]


def test_all_auditors_lose_bookies_equally_often_but_java_once_at_a_million() -> None:
    few, many = (list(plan_losses((JAVA, OURS), size, 5)) for size in (SIZES[0], SIZES[-1]))

    assert [contender for contender, _ in few] == [JAVA, OURS, OURS, JAVA]
    for contender in (JAVA, OURS):
        assert [n for each, repeats in few if each is contender for n in repeats] == [1, 2, 3, 4, 5]
    assert [repeats for each, repeats in many if each is JAVA] == [range(1, 2)]


@dataclass
class Ground:
    """A place without servers."""

    data: Path
    metadata_service_uri: str = "zk+hierarchical://127.0.0.1:1/ledgers"

    @property
    def logs(self) -> Path:
        return self.data

    def start_autorecovery(self, name: str, *, settings: Mapping[str, str]) -> Child:
        raise NotImplementedError


def test_the_node_of_another_tree_runs_there_with_its_own_python(tmp_path: Path) -> None:
    python = tmp_path / "tree/.venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "$$ $PWD $* $BOOKMENDER_METADATA_SERVICE_URI"\n')
    python.chmod(0o755)
    ground = Ground(tmp_path / "ground")

    child = other_tree(tmp_path / "tree").start(ground)

    assert child.wait(timeout_s=10)
    said = f"{child.pid} {tmp_path}/tree -m daemon daemon {ground.metadata_service_uri}\n"
    assert child.log.read_text() == said


def test_another_tree_takes_turns_with_ours_alone() -> None:
    names = [each.name for each in contenders_for(CONTENDERS, None, Path("/x"), is_quick=True)]

    assert names == ["ours", "other"]


@pytest.mark.parametrize(("share", "value"), [(0.5, 50.0), (0.99, 99.0), (1.0, 100.0)])
def test_percentiles_are_values_that_occurred(share: float, value: float) -> None:
    assert percentile([float(each) for each in range(1, 101)], share) == value


def test_latencies_are_sorted_first() -> None:
    found = latencies([3.0, 1.0, 2.0])

    assert found == {"adds": 3, "p50_ms": 2.0, "p99_ms": 3.0, "max_ms": 3.0}
