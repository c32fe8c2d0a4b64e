"""Names of earlier releases: most work, the others are answered with what to use instead."""

import sys

import click
import pytest
from click.testing import CliRunner

from daemon.cli.main import CommandGroup, cli
from daemon.cli.names import GONE, RENAMED
from tests.daemon.cli_calls import exit_code
from tests.deploy.given_commands import refusal

OLD_LINES = {
    "check list -c FILE -o ids": "check -c FILE -o ids",
    "check pause -c FILE -o json": "check --pause -c FILE -o json",
    "check resume -c FILE -o json": "check --resume -c FILE -o json",
    "check run replicas -c FILE -o json --wait": "check replicas -c FILE -o json --wait",
    "demo --bookies 5 --keep": "local demo --bookies 5 --keep",
    "feed failures NAME --retry --store URL -c FILE -o ids": (
        "feed clients NAME --retry --store URL -c FILE -o ids"
    ),
    "feed forget NAME --yes --dry-run --store URL -c FILE -o json": (
        "feed clients --forget NAME --yes --dry-run --store URL -c FILE -o json"
    ),
    "health explain NO_AUDITOR": "status --explain NO_AUDITOR",
    "hold begin -c FILE -o json --for 1h --reason why": (
        "hold --begin -c FILE -o json --for 1h --reason why"
    ),
    "hold end -c FILE -o json --yes": "hold --end -c FILE -o json --yes",
    "hold show -c FILE -o json": "hold -c FILE -o json",
    "observe -c FILE -o ids --json": "plan --all -c FILE -o ids --json",
    "queue list -c FILE -o ids --limit 5": "queue -c FILE -o ids --limit 5",
}
"""Lines with all options that each old name has, and what they mean today."""


@pytest.mark.parametrize("old", RENAMED)
def test_an_old_name_works_with_its_options(monkeypatch: pytest.MonkeyPatch, old: str) -> None:
    (line,) = (each for each in OLD_LINES if each.startswith(old))
    given: list[str] = []

    @click.command(context_settings={"ignore_unknown_options": True})
    @click.argument("rest", nargs=-1, type=click.UNPROCESSED)
    @click.pass_context
    def record(ctx: click.Context, rest: tuple[str, ...]) -> None:
        given.extend([str(ctx.info_name), *rest])

    assert refusal(OLD_LINES[line].split()) is None
    monkeypatch.setattr(CommandGroup, "get_command", lambda group, ctx, name: record)

    result = CliRunner().invoke(cli, line.split())

    assert (given, result.output) == (OLD_LINES[line].split(), "")


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_person_is_told_the_new_name_and_a_script_is_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_terminal: bool
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)

    assert exit_code(monkeypatch, "queue", "list", "--help") == 0

    note = "bookmender queue list is now: bookmender queue\n"
    assert capsys.readouterr().err == (note if is_terminal else "")


@pytest.mark.parametrize("path", GONE)
def test_what_is_gone_is_answered_with_what_to_use(path: str) -> None:
    result = CliRunner().invoke(cli, path.split())

    assert result.exit_code == 2
    assert f"There is no bookmender {path}. Use: {GONE[path]}" in result.stderr


def test_hidden_commands_have_help() -> None:
    listed = CliRunner().invoke(cli, ["--help"]).output

    for hidden, said in (("shell", "whoisauditor"), ("completion", "zsh")):
        assert f"\n  {hidden} " not in listed
        assert said in CliRunner().invoke(cli, [hidden, "--help"]).output
    assert "trust-identities" not in CliRunner().invoke(cli, ["bookie", "--help"]).output
