"""Counting what a run of fsck used, and restricting its cores."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from bench.spark_processes import on_cores, spark_cpu

BUSY = "import sys; sum(range(3_000_000)); print(flush=True); sys.stdin.read()"
WITH_CHILD = (
    "import subprocess, sys\n"
    f"with subprocess.Popen([sys.executable, '-c', {BUSY!r}], stdin=subprocess.PIPE):\n"
    "    sys.stdin.read()"
)


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """Yield a process with a child of its own that has been busy."""
    command = [sys.executable, "-c", WITH_CHILD]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        assert process.stdin is not None
        process.stdin.close()


def test_cpu_of_a_childs_children_is_counted_as_the_workers(child: subprocess.Popen[bytes]) -> None:
    assert spark_cpu()["workers_s"] > 0


def test_present_and_later_processes_share_the_cores(
    child: subprocess.Popen[bytes],
) -> None:
    before = os.sched_getaffinity(0)

    with on_cores(1, servers=[child.pid]):
        assert os.sched_getaffinity(0) == os.sched_getaffinity(child.pid) == {min(before)}
        later = [sys.executable, "-c", "import os; print(len(os.sched_getaffinity(0)))"]
        assert subprocess.check_output(later) == b"1\n"

    assert os.sched_getaffinity(0) == os.sched_getaffinity(child.pid) == before
