"""``bookmender disable`` and ``bookmender enable``: switch auto-recovery of the whole cluster."""

import json
from contextlib import suppress
from pathlib import Path

import click

from daemon.admin_session import AdminSession, run_in_session
from daemon.cli.main import config_option, output_option
from ledgers.errors import NodeExistsError, NoNodeError


@click.command()
@config_option
@output_option
def disable(config: Path | None, output: str) -> None:
    """Disable auto-recovery for the whole cluster, including Java's nodes.

    Use this before planned work that stops many bookies. No ledger is marked or leased until
    bookmender enable. Repairs in progress are completed.

    Exit code 0 also if auto-recovery was disabled already.
    """
    _report(output, is_enabled=False, has_changed=run_in_session(config, switch_off))


@click.command()
@config_option
@output_option
def enable(config: Path | None, output: str) -> None:
    """Enable auto-recovery again.

    Ledgers of bookies that were lost in the meantime are marked and repaired.

    Exit code 0 also if auto-recovery was enabled already.
    """
    _report(output, is_enabled=True, has_changed=run_in_session(config, switch_on))


async def switch_off(cluster: AdminSession) -> bool:
    """Disable auto-recovery, and return False if it was disabled already.

    The znode is shared with Java's AutoRecovery, and has no data.
    """
    with suppress(NodeExistsError):
        await cluster.store.create(cluster.paths.disable, with_parents=True)
        return True
    return False


async def switch_on(cluster: AdminSession) -> bool:
    with suppress(NoNodeError):
        await cluster.store.delete(cluster.paths.disable)
        return True
    return False


def _report(output: str, *, is_enabled: bool, has_changed: bool) -> None:
    if output == "json":
        click.echo(json.dumps({"is_enabled": is_enabled, "has_changed": has_changed}, indent=2))
        return
    state = "enabled" if is_enabled else "disabled"
    click.echo(f"auto-recovery is {state}" + ("" if has_changed else ", as it was"))
