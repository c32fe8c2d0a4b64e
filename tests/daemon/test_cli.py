"""Errors of the command as a user sees them: one clear line, and an exit code."""

import json
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest

from daemon.cli.main import CommandGroup, LedgerId, json_option, main, output_option
from daemon.local.spec import ClusterSpec
from daemon.operations.errors import UnknownBookieError
from ledgers.errors import (
    BookmenderError,
    ConflictError,
    CorruptionError,
    NoSuchLedgerError,
    SettingsError,
    UnauthorizedError,
    UnavailableError,
)
from tests.daemon.cli_calls import exit_code, fails_with


@pytest.fixture(autouse=True)
def _without_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("BOOKMENDER_"):
            monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        pytest.param(SettingsError("wrong"), 2, id="wrong usage"),
        pytest.param(UnknownBookieError("nothing names b1"), 2, id="a mistyped bookie"),
        pytest.param(UnavailableError("no answer"), 3, id="could not tell"),
        pytest.param(UnauthorizedError("shut out"), 3, id="access denied, and could not tell"),
        pytest.param(NoSuchLedgerError("no such ledger", ledger_id=7), 1, id="with its id"),
        pytest.param(CorruptionError("rubbish"), 1, id="found damage"),
        pytest.param(ConflictError("conflict"), 1, id="refused"),
    ],
)
def test_an_expected_error_is_one_line_and_an_exit_code(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BookmenderError,
    code: int,
) -> None:
    fails_with(monkeypatch, error)

    assert exit_code(monkeypatch, "fail") == code

    captured = capsys.readouterr()
    assert captured.err == f"bookmender: {error}\n"
    assert captured.out == ""


def test_control_characters_in_an_error_are_escaped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Line breaks and tabs stay."""
    fails_with(monkeypatch, CorruptionError("the log:\n\tno number", text="\x1b[31m"))

    exit_code(monkeypatch, "fail")

    assert capsys.readouterr().err == "bookmender: the log:\n    no number (text=\\x1b[31m)\n"


def test_an_unexpected_exception_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    fails_with(monkeypatch, ZeroDivisionError())
    monkeypatch.setattr(sys, "argv", ["bookmender", "fail"])

    with pytest.raises(ZeroDivisionError):
        main()


def test_an_interruption_exits_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    fails_with(monkeypatch, KeyboardInterrupt())

    assert exit_code(monkeypatch, "fail") == 130


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["--help"], id="help"),
        pytest.param(["status", "--help"], id="help of a command"),
        pytest.param(["local", "status"], id="what a command prints"),
    ],
)
def test_a_closed_output_pipe_exits_quietly_with_141(arguments: list[str], tmp_path: Path) -> None:
    with_local_cluster(tmp_path)
    reads, writes = os.pipe()
    os.close(reads)

    ended = subprocess.run(
        [sys.executable, "-m", "daemon", *arguments],
        stdout=writes,
        stderr=subprocess.PIPE,
        env=os.environ | {"XDG_DATA_HOME": str(tmp_path)},
        check=False,
    )
    os.close(writes)

    assert (ended.returncode, ended.stderr) == (141, b"")


def test_a_narrow_ascii_terminal_gets_whole_addresses(tmp_path: Path) -> None:
    with_local_cluster(tmp_path)
    narrow = {"COLUMNS": "20", "PYTHONIOENCODING": "ascii"}

    ended = subprocess.run(
        [sys.executable, "-m", "daemon", "local", "status"],
        capture_output=True,
        text=True,
        env=os.environ | {"XDG_DATA_HOME": str(tmp_path)} | narrow,
        check=False,
    )

    assert ended.stderr == ""
    assert "127.0.0.1:20002            down" in ended.stdout


def test_characters_that_stdout_cannot_encode_are_escaped() -> None:
    code = (
        "import click\n"
        "from daemon.cli import main as cli\n"
        "cli.CommandGroup.get_command = lambda *_: click.Command('x', callback=lambda: "
        "print('\\u2026'))\n"
        "cli.main()"
    )

    ended = subprocess.run(
        [sys.executable, "-c", code, "x"],
        capture_output=True,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
        check=False,
    )

    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"\\u2026\n", b"")


def with_local_cluster(home: Path) -> None:
    """Create a stopped cluster where ``bookmender local`` looks for it."""
    data = home / "bookmender" / "local"
    data.mkdir(parents=True)
    ClusterSpec(zookeeper_port=20_001, bookie_ports=(20_002,)).save(data)


@pytest.mark.parametrize("code", [0, 1, 3])
def test_the_exit_code_of_a_command_is_passed_on(
    monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    fails_with(monkeypatch, SystemExit(code))

    assert exit_code(monkeypatch, "fail") == code


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        pytest.param(["--help"], 0, "Usage:", id="help"),
        pytest.param(["ledger", "--help"], 0, "show", id="help of a group"),
        pytest.param(["--version"], 0, "bookmender", id="version"),
        pytest.param(["frobnicate"], 2, "No such command", id="an unknown command"),
        pytest.param(["statsu"], 2, "bookmender status?", id="a misspelled command"),
        pytest.param(["drain", "b1:3181"], 2, "bookmender bookie drain?", id="without its group"),
        pytest.param(["status", "--frobnicate"], 2, "No such option", id="an unknown option"),
        pytest.param(["status", "-o", "xml"], 2, "'xml' is not one of", id="a wrong choice"),
        pytest.param(["status", "-c", "none.toml"], 2, "does not exist", id="a missing file"),
        pytest.param(["ledger", "show", "x"], 2, "not a ledger ID", id="not a number"),
        pytest.param(["ledger", "show", "--", "-1"], 2, "not a ledger ID", id="not a ledger id"),
        pytest.param(["ledger", "show"], 2, "Missing argument", id="an argument is missing"),
        pytest.param(["queue", "--limit", "0"], 2, "not in the range", id="a limit of 0"),
        pytest.param(["check", "--wait"], 2, "NAME of a check", id="a wait for no check"),
        pytest.param(["check", "replicas", "--pause"], 2, "only one of", id="two orders"),
        pytest.param(["status", "--explain", "-o", "json"], 2, "text only", id="text as JSON"),
        pytest.param(["status"], 2, "metadata_service_uri is not set", id="without a cluster"),
    ],
)
def test_wrong_usage_is_explained_and_exits_with_2(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    said: str,
) -> None:
    assert exit_code(monkeypatch, *arguments) == code

    captured = capsys.readouterr()
    assert said in captured.out + captured.err
    assert (captured.err == "") is (code == 0)


def test_a_wrong_setting_is_reported_with_its_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "bookmender.toml"
    path.write_text("metadata_service_uri = 'zk://127.0.0.1/ledgers'\n[log]\nlevel = 'loud'\n")

    assert exit_code(monkeypatch, "daemon", "-c", str(path)) == 2

    assert capsys.readouterr().err == (
        f"bookmender: {path}: log.level is 'loud'; allowed: debug, info, warning, error\n"
    )


def test_a_settings_file_below_a_closed_folder_is_not_called_absent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path, stat = tmp_path / "bookmender.toml", Path.stat

    def denied(self: Path, **options: bool) -> os.stat_result:
        if self == path:
            raise PermissionError
        return stat(self, **options)

    monkeypatch.setattr(Path, "stat", denied)

    assert exit_code(monkeypatch, "status", "-c", str(path)) == 2

    assert f"{path} cannot be read: permission denied" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [["status"], ["queue"], ["ledger", "show", "1"], ["daemon"], ["plan", "--all"]],
)
def test_without_zookeeper_commands_exit_3_and_name_the_hosts(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    command: list[str],
) -> None:
    # Nothing listens on ports 1 and 2, so the connection is refused at once.
    monkeypatch.setenv("BOOKMENDER_METADATA_SERVICE_URI", "zk://127.0.0.1:1;127.0.0.1:2/ledgers")
    monkeypatch.setenv("BOOKMENDER_NODE_STATE_DIR", str(tmp_path))
    monkeypatch.setenv("BOOKMENDER_ZOOKEEPER_CONNECT_TIMEOUT_S", "0.5")

    assert exit_code(monkeypatch, *command) == 3

    assert capsys.readouterr().err.endswith(
        "bookmender: no ZooKeeper server answers: nothing listens at 127.0.0.1:1; nothing listens "
        "at 127.0.0.1:2. Next: start the servers, or correct metadata_service_uri\n"
    )


# --- Errors in JSON -------------------------------------------------------------------------------


@pytest.mark.parametrize("option", [("-o", "json"), ("--output", "json"), ("--json",)])
@pytest.mark.parametrize(
    ("error", "code"),
    [
        pytest.param(NoSuchLedgerError("no such ledger", ledger_id=7), 1, id="an unknown ledger"),
        pytest.param(UnavailableError("no answer"), 3, id="could not tell"),
        pytest.param(click.UsageError("which bookie?"), 2, id="wrong usage"),
    ],
)
def test_with_json_output_an_error_is_an_object(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    code: int,
    option: tuple[str, ...],
) -> None:
    @click.command()
    @output_option
    @json_option
    def fail(output: str) -> None:
        raise error

    monkeypatch.setattr(CommandGroup, "get_command", lambda group, ctx, name: fail)

    assert exit_code(monkeypatch, "fail", *option) == code

    captured = capsys.readouterr()
    message = error.message if isinstance(error, click.UsageError) else str(error)
    assert json.loads(captured.out) == {"error": message, "exit_code": code}
    assert message in captured.err, "for people"


def test_with_json_output_a_wrong_argument_is_an_object(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(monkeypatch, "ledger", "show", "1_0", "-o", "json") == 2

    assert "'1_0' is not a ledger ID" in json.loads(capsys.readouterr().out)["error"]


# --- Ledger ids -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["1_0", "-1", "+1", " 1", "1.0", "0x1", "\u0663", "", str(2**63), "9" * 5_000]
)
def test_a_ledger_id_is_plain_digits(text: str) -> None:
    with pytest.raises(click.BadParameter, match="not a ledger ID"):
        LedgerId().convert(text, None, None)


@pytest.mark.parametrize("number", [0, 4711, 2**63 - 1])
def test_a_valid_ledger_id_is_accepted(number: int) -> None:
    assert LedgerId().convert(str(number), None, None) == number
