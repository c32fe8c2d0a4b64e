"""A run of fsck on a standalone Spark cluster whose processes die during the run."""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from daemon.local.processes import Child, wait_until
from tests.cluster.fsck_ledgers import Ledgers, make_ledgers, verdicts_of, written_parts
from tests.fsck_driver import PARTS
from tests.spark_cluster import StandaloneSpark, standalone_spark

pytestmark = [pytest.mark.cluster, pytest.mark.long(group="fsck"), pytest.mark.timeout(600)]

RUN = "20261121T193500Z"
READS_PER_S = 100
"""So few that a run takes ten seconds."""
TIMEOUT_S = 120.0


@pytest.fixture(scope="module")
def ledgers(uri: str) -> Ledgers:
    return asyncio.run(make_ledgers(uri))


@pytest.fixture(scope="module")
def standalone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandaloneSpark]:
    with standalone_spark(tmp_path_factory.mktemp("spark")) as spark:
        yield spark


def test_a_run_survives_its_driver_and_an_executor(
    standalone: StandaloneSpark, uri: str, ledgers: Ledgers, tmp_path: Path
) -> None:
    output = tmp_path / "output"
    output.mkdir()

    def drive(name: str) -> Child:
        arguments = [standalone.master, uri, str(output), RUN, str(READS_PER_S)]
        command = [sys.executable, "-m", "tests.fsck_driver", *arguments]
        return Child(name, command, log=tmp_path / f"{name}.log", environment=os.environ)

    def parts() -> dict[str, int]:
        return written_parts(output)

    killed = drive("killed")
    wait_until(lambda: len(parts()) > 0, [killed], timeout_s=TIMEOUT_S)
    killed.kill()
    done = parts()
    _wait(lambda: not standalone.executors())

    again = drive("again")
    wait_until(lambda: len(parts()) > len(done), [again], timeout_s=TIMEOUT_S)
    os.kill(standalone.executors()[0], signal.SIGKILL)
    ended = again.wait(timeout_s=TIMEOUT_S)

    assert ended, again.log_tail()
    assert again.exit_code == 0, again.log_tail()
    assert len(done) < PARTS
    assert done.items() <= parts().items()
    assert verdicts_of(output, RUN) == ledgers.verdicts
    summary = json.loads((output / "summary.json").read_text())
    assert summary["ledgers"] == len(ledgers.all)
    assert summary["is_complete"]


def _wait(is_so: Callable[[], bool]) -> None:
    """Wait for something that other processes do."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
