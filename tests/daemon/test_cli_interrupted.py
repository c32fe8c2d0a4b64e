"""Commands that are interrupted, by Ctrl-C or by other signals."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import click
import pytest

from daemon.cli import bookie as bookie_command
from daemon.cli import check as check_command
from daemon.cli import repair as repair_command
from daemon.cli.main import CommandGroup
from daemon.cli.progress import explain_interrupt
from ledgers.errors import SessionLostError
from tests.daemon.cli_calls import exit_code

# --- Ctrl-C ---------------------------------------------------------------------------------------


def test_an_interruption_during_imports_is_quiet() -> None:
    code = (
        "import sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'daemon.cli.main': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Finder())\n"
        "from daemon.cli.start import main\n"
        "main()"
    )

    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, timeout=60, check=False
    )

    assert (ended.returncode, ended.stderr) == (130, b"")


def test_an_interrupted_command_says_what_stays_in_force(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(KeyboardInterrupt), explain_interrupt("The order stays."):
        raise KeyboardInterrupt

    assert capsys.readouterr().err == "Interrupted. The order stays.\n"


def test_a_command_that_loses_its_session_says_what_stays(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SessionLostError), explain_interrupt("The order stays."):
        raise SessionLostError("the ZooKeeper session is lost")

    assert capsys.readouterr().err == (
        "Check ZooKeeper, and run the command again. The order stays.\n"
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["bookie", "drain", "b1:1", "--wait"], "bookmender bookie drain shows the progress"),
        (["bookie", "decommission", "b1:1"], "b1:1 keeps its cookie"),
        (["repair", "7"], "nodes continue the work"),
        (["check", "replicas", "--wait"], "bookmender check shows the progress"),
    ],
    ids=["drain", "decommission", "repair", "check"],
)
def test_each_long_command_explains_its_interruption(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    said: str,
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    async def never(*_: object, **__: object) -> None:
        interrupted()

    monkeypatch.setenv("BOOKMENDER_METADATA_SERVICE_URI", "zk+hierarchical://127.0.0.1:1/ledgers")
    for module in (bookie_command, check_command):
        monkeypatch.setattr(module, "run_in_session", interrupted)
    monkeypatch.setattr(repair_command, "repair_ledgers", never)

    assert exit_code(monkeypatch, *arguments) == 130

    assert said in capsys.readouterr().err


# --- Signals that end a command as Ctrl-C does ----------------------------------------------------

ENDING = [(signal.SIGTERM, 143), (signal.SIGHUP, 129)]


def ends_with(monkeypatch: pytest.MonkeyPatch, number: signal.Signals) -> None:
    """Install a command ``end`` that gets the signal while it works."""

    @click.command()
    def end() -> None:
        with explain_interrupt("The order stays."):
            signal.raise_signal(number)

    monkeypatch.setattr(CommandGroup, "get_command", lambda group, ctx, name: end)


@contextmanager
def handled_by(handler: signal.Handlers, *numbers: signal.Signals) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


@pytest.mark.parametrize(("number", "code"), ENDING)
def test_a_termination_signal_is_explained_like_ctrl_c(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: signal.Signals,
    code: int,
) -> None:
    ends_with(monkeypatch, number)

    with handled_by(signal.SIG_DFL, number):  # the tests may run under nohup
        assert exit_code(monkeypatch, "end") == code
        assert signal.getsignal(number) is signal.SIG_DFL

    assert "Interrupted. The order stays." in capsys.readouterr().err


def test_sigterm_is_explained_even_if_sigint_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell ignores SIGINT in commands that a script starts with ``&``."""
    ends_with(monkeypatch, signal.SIGTERM)

    with handled_by(signal.SIG_IGN, signal.SIGINT):
        assert exit_code(monkeypatch, "end") == 143


def test_sighup_is_ignored_under_nohup(monkeypatch: pytest.MonkeyPatch) -> None:
    ends_with(monkeypatch, signal.SIGHUP)

    with handled_by(signal.SIG_IGN, signal.SIGHUP):
        assert exit_code(monkeypatch, "end") == 0
