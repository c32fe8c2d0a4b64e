"""Exit codes and previews of ``bookmender ledger close``."""

import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from daemon.cli import ledger as ledger_command
from daemon.cli.ledger import closing_text
from daemon.operations.close import LedgerClosing
from daemon.settings import Settings
from tests.daemon.closing import closer, idle_ledger, unproven_ledger
from tests.daemon.settings_given import URI
from tests.daemon.test_close_damaged import with_damage
from tests.daemon.test_close_too_few import (
    acknowledged_by_both_of_two,
    acknowledged_by_two_of_three,
)
from tests.replication.ledger_values import B1, B2, B3
from tests.replication.nodes import LEDGER
from tests.said import Said
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


async def previews() -> dict[str, str]:
    recent, damaged = await idle_ledger(), await with_damage(4)
    recent.put(LEDGER, 10, B1, B2)
    too_few = await acknowledged_by_two_of_three()
    await too_few.kill(B2, B3)
    clusters = {
        "its writer may be running": recent,
        "two bookies were reformatted": await unproven_ledger(),
        "damaged entries": damaged,
        "too few bookies answer": too_few,
        "no place for the last entries": await acknowledged_by_both_of_two(),
    }
    found = {name: await (await closer(each)).look(LEDGER) for name, each in clusters.items()}
    return {
        "no doubt": closing_text(OPEN),
        "a doubtful end": closing_text(replace(OPEN, end_doubt="wiped: B2")),
        **{name: closing_text(each) for name, each in found.items()},
    }


def test_a_preview_says_which_options_close_the_ledger(said: Said) -> None:
    said("closing", run(previews()))
