"""Run commands as from a shell, on a cluster in memory."""

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from structlog.testing import capture_logs

from daemon.admin_session import AdminSession
from tests.daemon.visits import visiting
from tests.replication.cluster import Cluster, shut_out
from tests.virtual_time import run

Prepare = Callable[[Cluster], Awaitable[None]]
Look = Callable[[Cluster], Awaitable[Any]]


def run_in_memory(
    monkeypatch: pytest.MonkeyPatch,
    module: ModuleType,
    command: click.Command,
    *arguments: str,
    prepare: Prepare,
    look: Look | None = None,
    shut: Sequence[str] = (),
) -> tuple[Result, Any]:
    """Run the command of this module on a prepared cluster.

    Return what it prints, and what ``look`` finds afterwards. ``shut``: znodes that the command's
    session may not read.
    """
    found: list[Any] = []

    def admin_session(config: Path | None, action: Callable[[AdminSession], Awaitable[Any]]) -> Any:
        async def acting() -> Any:
            cluster = await Cluster.start()
            await prepare(cluster)
            here = visiting(cluster)
            shut_out(here.store, *shut)
            returned = await action(here)
            if look is not None:
                found.append(await look(cluster))
            return returned

        return run(acting())

    monkeypatch.setattr(module, "run_in_session", admin_session)
    with capture_logs():  # logs would mix with the output
        result = CliRunner().invoke(command, arguments)
    return result, found[0] if found else None
