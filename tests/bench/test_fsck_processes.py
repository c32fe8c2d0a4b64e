"""How the bench of fsck counts what a run used, and gives it fewer cores."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from bench.fsck.processes import SparkCpu, on_cores, scaling_of_cores

BUSY = "import sys; sum(range(3_000_000)); print(flush=True); sys.stdin.read()"
WITH_CHILD = (
    "import subprocess, sys\n"
    f"with subprocess.Popen([sys.executable, '-c', {BUSY!r}], stdin=subprocess.PIPE):\n"
    "    sys.stdin.read()"
)


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """It has a child of its own, which has been busy."""
    command = [sys.executable, "-c", WITH_CHILD]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        assert process.stdin is not None
        process.stdin.close()


def test_what_a_childs_children_use_is_the_workers(child: subprocess.Popen[bytes]) -> None:
    spent = SparkCpu.now()

    assert spent.workers_s > 0
    assert spent.total_s == spent.driver_s + spent.jvm_s + spent.workers_s


def test_all_that_is_there_and_comes_later_shares_the_cores(
    child: subprocess.Popen[bytes],
) -> None:
    before = os.sched_getaffinity(0)

    with on_cores(1, servers=[child.pid]):
        assert os.sched_getaffinity(0) == os.sched_getaffinity(child.pid) == {min(before)}
        later = [sys.executable, "-c", "import os; print(len(os.sched_getaffinity(0)))"]
        assert subprocess.check_output(later) == b"1\n"

    assert os.sched_getaffinity(0) == os.sched_getaffinity(child.pid) == before


def test_what_a_second_core_is_worth_is_a_ratio_of_what_gets_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("bench.fsck.processes.LOOP_S", 0.2)

    assert 0.5 < scaling_of_cores() < 5
