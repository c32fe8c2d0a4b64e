"""Run commands as from a shell, on a cluster in memory."""

import sys
from collections.abc import Awaitable, Callable, Sequence
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
InMemory = Callable[..., tuple[Result, Any]]


async def nothing(cluster: Cluster) -> None:
    """Leave the cluster as it is."""


@pytest.fixture
def in_memory(monkeypatch: pytest.MonkeyPatch) -> InMemory:
    """Return a function that runs a command on a prepared cluster.

    It returns what the command prints, and what ``look`` finds afterwards, even if the command
    fails. ``shut``: znodes that the command's session may not read.
    """

    def run_it(
        command: click.Command,
        *arguments: str,
        prepare: Prepare = nothing,
        look: Look | None = None,
        shut: Sequence[str] = (),
        **given: Any,
    ) -> tuple[Result, Any]:
        found: list[Any] = []

        def in_session(given: object, action: Callable[[AdminSession], Awaitable[Any]]) -> Any:
            async def acting() -> Any:
                cluster = await Cluster.start()
                await prepare(cluster)
                here = visiting(cluster)
                shut_out(here.store, *shut)
                try:
                    return await action(here)
                finally:
                    if look is not None:
                        found[:] = [await look(cluster)]

            return run(acting())

        for name in ("run_in_session", "run_with"):
            for module in [
                m for m in sys.modules if m.startswith(("daemon.cli.", "daemon.status."))
            ]:
                if hasattr(sys.modules[module], name):
                    monkeypatch.setattr(sys.modules[module], name, in_session)
        with capture_logs():  # logs would mix with the output
            result = CliRunner().invoke(command, arguments, **given)
        return result, found[0] if found else None

    return run_it
