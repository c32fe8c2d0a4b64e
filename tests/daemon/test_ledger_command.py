"""What ``bookmender ledger show`` says of a ledger."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from click.testing import CliRunner

from daemon import ledger_command
from daemon.visit import Visit
from ledgers.errors import CorruptionError
from tests.auditor.scenes import with_ledgers
from tests.daemon.visits import visiting
from tests.replication.ledger_values import B1, B2


def test_metadata_that_cannot_be_read_is_one_line_with_what_to_do_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def on_nonsense(action: Callable[[Visit], Awaitable[object]]) -> object:
        cluster = await with_ledgers((B1, B2))
        await cluster.store.set(cluster.manager.path(0), b"nonsense", version=-1)
        return await action(visiting(cluster))

    monkeypatch.setattr(
        ledger_command, "run_visit", lambda config, action: asyncio.run(on_nonsense(action))
    )

    error = CliRunner().invoke(ledger_command.ledger, ["show", "0"]).exception

    assert isinstance(error, CorruptionError)
    assert str(error) == (
        "its metadata cannot be read: ledger metadata does not begin with its version "
        "(data=b'nonsense') (ledger_id=0); bookmender ledger restore 0 lists what it was before, "
        "if written on this host"
    )
