"""The commands of the local cluster as a user types them, on real servers."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from daemon.local import znodes
from daemon.local.processes import wait_until
from daemon.local.writing import OPEN_SIZE
from ledgers.reading import OpenedLedger, find_end
from tests import forked
from tests.cluster.our_client import our_client

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("_prerequisites")]

COMMAND = [sys.executable, "-c", "from daemon.cli.main import main; main()", "local"]
TIMEOUT_S = 60.0


class Terminal:
    """Types commands about one data folder."""

    def __init__(self, data: Path) -> None:
        self.data = data

    def command(self, *arguments: str) -> list[str]:
        return [*COMMAND, *arguments, "--data", str(self.data)]

    def run(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        command = ["daemon", "local", *arguments, "--data", str(self.data)]
        return forked.run(command, os.environ, timeout_s=TIMEOUT_S)

    def status(self) -> Any:
        return json.loads(self.run("status", "-o", "json").stdout)

    def states(self) -> list[str]:
        return [bookie["state"] for bookie in self.status()["bookies"]]

    def processes(self) -> list[str]:
        """Return the command lines of the processes on this folder, without the terminal's."""
        listed = subprocess.run(["ps", "-wweo", "args"], capture_output=True, text=True, check=True)
        return [line for line in listed.stdout.splitlines() if str(self.data) in line]


def wait_for(condition: Callable[[], bool]) -> None:
    wait_until(condition, [], timeout_s=TIMEOUT_S)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    """Yield a terminal on a folder without a cluster. A cluster that it starts is stopped at the
    end."""
    terminal = Terminal(tmp_path / "data")
    yield terminal
    terminal.run("down")


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Terminal]:
    """Yield a terminal on a cluster of two bookies. Each test leaves both running."""
    terminal = Terminal(tmp_path_factory.mktemp("up") / "data")
    started = terminal.run("up", "--bookies", "2", "--session-timeout", "2")
    assert started.returncode == 0, started.stderr
    assert "zk+hierarchical://127.0.0.1:" in started.stdout
    yield terminal
    assert terminal.run("down").returncode == 0
    assert terminal.processes() == []


def test_up_returns_when_every_bookie_is_writable(up: Terminal) -> None:
    shown = up.run("status")

    assert shown.returncode == 0
    assert shown.stdout.count("writable") == 2
    assert up.states() == ["writable", "writable"]


def test_a_bookie_is_killed_and_started_by_its_number(up: Terminal) -> None:
    address = up.status()["bookies"][1]["address"]

    killed = up.run("kill", "2")

    assert killed.stdout.startswith(f"killed {address}; ")
    assert up.states() == ["writable", "down"]
    assert up.run("status").returncode == 1

    started = up.run("start", "2")
    assert started.stdout == f"started {address}\n"
    assert up.states() == ["writable", "writable"]


def test_a_stopped_bookie_is_started_by_its_id(up: Terminal) -> None:
    address = up.status()["bookies"][0]["address"]

    stopped = up.run("kill", "--stop", address)

    assert stopped.stdout == f"stopped {address}\n"
    assert up.run("start", address).returncode == 0
    assert up.states() == ["writable", "writable"]


def test_a_wiped_bookie_stays_down_until_it_is_started(up: Terminal) -> None:
    assert up.run("wipe", "1").returncode == 0

    assert up.states() == ["down", "writable"]

    assert up.run("start", "1").returncode == 0
    assert up.states() == ["writable", "writable"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        pytest.param(["up"], "running already", id="it runs already"),
        pytest.param(["kill", "3"], "there is no bookie 3, only 1: 127", id="no such bookie"),
        pytest.param(["start", "1"], "is running already", id="the bookie runs already"),
    ],
)
def test_wrong_calls_are_refused_in_one_line(
    up: Terminal, arguments: list[str], complaint: str
) -> None:
    refused = up.run(*arguments)

    assert refused.returncode == 2
    assert complaint in refused.stderr
    assert refused.stderr.count("\n") == 1
    assert up.states() == ["writable", "writable"]


@pytest.mark.long(group="local")
def test_up_skips_decommissioned_and_starts_wiped_bookies(
    terminal: Terminal,
) -> None:
    terminal.run("up", "--bookies", "3", "--session-timeout", "2")
    first, *_ = terminal.status()["bookies"]
    terminal.run("kill", "1")
    with znodes.session(int(terminal.status()["zookeeper"]["address"].rpartition(":")[2])) as tree:
        tree.delete_cookie(first["address"])  # as a decommission does
    refused = terminal.run("start", "1")
    terminal.run("down")
    assert terminal.run("wipe", "2").returncode == 0

    started = terminal.run("up")

    assert started.returncode == 0, started.stderr
    assert ": 2 bookies," in started.stdout
    assert f"{first['address']}  left out" in started.stdout
    assert terminal.states() == ["down", "writable", "writable"]
    assert refused.returncode == 2
    assert "has data but no cookie" in refused.stderr
    assert terminal.run("wipe", "1").returncode == 0
    assert terminal.run("start", "1").returncode == 0
    assert terminal.states() == ["writable"] * 3


@pytest.mark.long(group="local")
def test_write_can_leave_ledgers_open(
    terminal: Terminal,
) -> None:
    """The ledgers look as if their writer had died."""
    started = json.loads(terminal.run("up", "--bookies", "3", "-o", "json").stdout)

    wrote = terminal.run("write", "--ledgers", "4", "--open", "2")

    assert wrote.stdout.startswith("wrote 4 ledgers, "), wrote.stderr
    assert wrote.stdout.endswith("left open without a writer: ledger 2, 3\n")
    found = [asyncio.run(opened(started["metadata_service_uri"], i)) for i in range(4)]
    assert [each.metadata.state.name for each in found] == ["CLOSED", "CLOSED", "OPEN", "OPEN"]
    assert [each.lac for each in found[2:]] == [OPEN_SIZE[1] - 2] * 2, "the last but one"


@pytest.mark.long(group="local")
def test_writing_after_a_kill_fails_with_advice(
    terminal: Terminal,
) -> None:
    terminal.run("up", "--bookies", "3")
    for bookie in ("2", "3"):
        terminal.run("kill", bookie)  # it stays registered for ten seconds more

    ended = terminal.run("write")

    told = ended.stderr.splitlines()
    assert ended.returncode == 3, ended.stderr
    assert told[0].startswith("stopped; wrote ")
    assert told[1].startswith("left open without a writer: ledger ")
    assert "no bookie is left to take over" in told[2]
    assert "`bookmender local status --data" in told[2]
    assert len(told) == 3


async def opened(uri: str, ledger_id: int) -> OpenedLedger:
    async with our_client(uri) as client:
        versioned = await client.manager.read(ledger_id)
        return await find_end(versioned, bookies=client.bookies, clock=client.clock)


@pytest.mark.long(group="local")
def test_the_same_cluster_comes_back_after_down(terminal: Terminal) -> None:
    first = terminal.run("up", "--bookies", "1", "-o", "json")
    terminal.run("down")
    assert terminal.processes() == []

    second = terminal.run("up", "-o", "json")

    assert addresses(second.stdout) == addresses(first.stdout)


def addresses(status: str) -> tuple[str, list[str]]:
    found = json.loads(status)
    return found["metadata_service_uri"], [bookie["address"] for bookie in found["bookies"]]


@pytest.mark.long(group="local")
def test_no_process_is_left_when_up_is_interrupted(terminal: Terminal) -> None:
    with subprocess.Popen(terminal.command("up", "--bookies", "1")) as started:
        wait_for((terminal.data / "logs" / "zookeeper.log").exists)

        started.send_signal(signal.SIGINT)

    assert started.returncode == 130
    assert terminal.processes() == []
    assert not terminal.data.exists()


@pytest.mark.long(group="local")
def test_a_killed_up_leaves_what_down_stops(terminal: Terminal) -> None:
    with subprocess.Popen(terminal.command("up", "--bookies", "1")) as started:
        wait_for(
            lambda: any("-Dbookmender.server=zookeeper" in each for each in terminal.processes())
        )

        started.kill()

    assert terminal.run("up").returncode == 2
    assert terminal.run("down").stdout == "stopped\n"
    assert terminal.processes() == []


@pytest.mark.long(group="local")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_a_foreground_cluster(terminal: Terminal, number: signal.Signals) -> None:
    command = terminal.command("up", "--foreground", "--bookies", "1")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as foreground:
        assert foreground.stdout is not None
        assert "is up" in foreground.stdout.readline()
        assert terminal.states() == ["writable"]

        foreground.send_signal(number)

    assert foreground.returncode == 0
    assert terminal.processes() == []


@pytest.mark.long(group="local")
def test_down_stops_a_foreground_cluster(terminal: Terminal) -> None:
    command = terminal.command("up", "--foreground", "--bookies", "1")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as foreground:
        assert foreground.stdout is not None
        foreground.stdout.readline()

        down = terminal.run("down", "--delete")

    assert down.returncode == 0
    assert foreground.returncode == 0
    assert not terminal.data.exists()
