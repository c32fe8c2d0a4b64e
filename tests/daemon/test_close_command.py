"""Exit codes and help of ``bookmender ledger close``."""

import re

import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from daemon.cli import ledger as ledger_command
from daemon.cli.ledger import ledger
from daemon.operations.close import LedgerClosing
from daemon.settings import Settings
from tests.daemon.closing import closer, idle_ledger
from tests.daemon.settings_given import URI
from tests.replication.nodes import LEDGER
from tests.virtual_time import run


async def previewed() -> LedgerClosing:
    return await (await closer(await idle_ledger())).look(LEDGER)


OPEN = run(previewed())


@pytest.mark.parametrize(
    ("found", "options", "code"),
    [
        pytest.param(OPEN, [], 0, id="no doubt"),
        pytest.param(replace(OPEN, doubts=("it grew",)), [], 1, id="a doubt, refused with --yes"),
        pytest.param(replace(OPEN, doubts=("it grew",)), ["--force"], 0, id="a doubt, but forced"),
        pytest.param(replace(OPEN, held_back="a hold stands"), ["--force"], 1, id="a safety hold"),
        pytest.param(replace(OPEN, cannot_close="no answer"), ["--force"], 1, id="impossible"),
        pytest.param(replace(OPEN, end_doubt="wiped: B2"), [], 0, id="a doubtful end can be tried"),
    ],
)
def test_a_preview_exits_with_the_code_of_the_closing(
    monkeypatch: pytest.MonkeyPatch, found: LedgerClosing, options: list[str], code: int
) -> None:
    async def look(settings: Settings, ledger_id: int, **_: object) -> LedgerClosing:
        return found

    monkeypatch.setattr(ledger_command, "look_before_closing", look)
    environment = {"BOOKMENDER_METADATA_SERVICE_URI": URI}

    for output in ("text", "json"):
        arguments = [str(LEDGER), *options, "-o", output]
        shown = CliRunner().invoke(ledger_command.close, arguments, env=environment)
        assert shown.exit_code == code, shown
        assert "OPEN" in shown.stdout


@pytest.mark.parametrize("command", ["show", "close", "restore"])
def test_the_help_names_the_exit_code_for_an_unknown_ledger(command: str) -> None:
    shown = CliRunner().invoke(ledger, [command, "--help"]).output

    codes = " ".join(shown.partition("Exit code")[2].partition("Options:")[0].split())
    assert re.search(r"\b1[: ][^.]*no such (record or )?ledger", codes)
