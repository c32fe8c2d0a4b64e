"""Commands that are interrupted, by Ctrl-C or by who else may end them."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import click
import pytest

from daemon.cli import (
    check as check_command,
)
from daemon.cli import (
    decommission as decommission_command,
)
from daemon.cli import (
    drain as drain_command,
)
from daemon.cli import (
    repair as repair_command,
)
from daemon.cli.main import LazyGroup
from daemon.cli.progress import explain_interrupt
from tests.daemon.cli_calls import exit_code

# --- Ctrl-C -----------------------------------------------------------------------------------------


def test_an_interruption_while_the_rest_is_imported_is_quiet() -> None:
    code = (
        "import sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'daemon.cli.main': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Finder())\n"
        "from daemon.start import main\n"
        "main()"
    )

    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, timeout=60, check=False
    )

    assert (ended.returncode, ended.stderr) == (130, b"")


def test_who_is_interrupted_is_told_what_stays_in_force(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(KeyboardInterrupt), explain_interrupt("the order stands"):
        raise KeyboardInterrupt

    assert capsys.readouterr().err == "interrupted; the order stands\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["bookie", "drain", "b1:1", "--wait"], "bookmender bookie drain says how far"),
        (["bookie", "decommission", "b1:1"], "the cookie of b1:1 stays"),
        (["repair", "7"], "the nodes go on"),
        (["check", "run", "replicas", "--wait"], "bookmender check list tells of replicas"),
    ],
    ids=["drain", "decommission", "repair", "check"],
)
def test_the_long_commands_say_it(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    said: str,
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    async def never(*_: object) -> None:
        interrupted()

    monkeypatch.setenv("BOOKMENDER_METADATA_SERVICE_URI", "zk+hierarchical://127.0.0.1:1/ledgers")
    for module in (drain_command, decommission_command, check_command):
        monkeypatch.setattr(module, "run_in_session", interrupted)
    monkeypatch.setattr(repair_command, "_run", never)

    assert exit_code(monkeypatch, *arguments) == 130

    assert said in capsys.readouterr().err


# --- Signals that end a command as Ctrl-C does --------------------------------------------------------

ENDING = [(signal.SIGTERM, 143), (signal.SIGHUP, 129)]


def ends_with(monkeypatch: pytest.MonkeyPatch, number: signal.Signals) -> None:
    """A command ``end`` that gets the signal while it works, as one that gives something back
    does."""

    @click.command()
    def end() -> None:
        with explain_interrupt("the order stands"):
            signal.raise_signal(number)

    monkeypatch.setattr(LazyGroup, "get_command", lambda group, ctx, name: end)


@contextmanager
def handled_by(handler: signal.Handlers, *numbers: signal.Signals) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


@pytest.mark.parametrize(("number", "code"), ENDING)
def test_a_command_that_is_told_to_end_says_what_stays_as_at_ctrl_c(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: signal.Signals,
    code: int,
) -> None:
    ends_with(monkeypatch, number)

    with handled_by(signal.SIG_DFL, number):  # nohup may have been before the tests, too
        assert exit_code(monkeypatch, "end") == code
        assert signal.getsignal(number) is signal.SIG_DFL

    assert "interrupted; the order stands" in capsys.readouterr().err


def test_it_is_told_so_even_where_ctrl_c_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a shell has it for what a script starts with ``&``."""
    ends_with(monkeypatch, signal.SIGTERM)

    with handled_by(signal.SIG_IGN, signal.SIGINT):
        assert exit_code(monkeypatch, "end") == 143


def test_a_closed_terminal_is_ignored_where_nohup_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    ends_with(monkeypatch, signal.SIGHUP)

    with handled_by(signal.SIG_IGN, signal.SIGHUP):
        assert exit_code(monkeypatch, "end") == 0
