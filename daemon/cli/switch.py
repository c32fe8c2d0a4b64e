"""``bookmender disable`` and ``bookmender enable``: switch auto-recovery of the whole cluster.

``set_recovery_delay`` is here, too: the other setting of the whole cluster in ZooKeeper."""

import json
from contextlib import suppress
from pathlib import Path

import click

from daemon.admin_session import AdminSession, order_event, run_in_session
from daemon.cli.main import config_option, output_option
from ledgers.errors import NodeExistsError, NoNodeError
from ledgers.store import ANY_VERSION
from replication.znodes import recovery_delay_to_bytes


@click.command()
@config_option
@output_option
def disable(config: Path | None, output: str) -> None:
    """Disable auto-recovery for the whole cluster, including Java's nodes.

    Use this before planned work that stops many bookies. No ledger is marked or leased until
    bookmender enable. Repairs in progress are completed.

    The exit code is 0 even if auto-recovery was already disabled.
    """
    _report(output, is_enabled=False, has_changed=run_in_session(config, switch_off))


@click.command()
@config_option
@output_option
def enable(config: Path | None, output: str) -> None:
    """Enable auto-recovery again.

    Ledgers of bookies that were lost in the meantime are marked and repaired.

    The exit code is 0 even if auto-recovery was already enabled.
    """
    _report(output, is_enabled=True, has_changed=run_in_session(config, switch_on))


async def switch_off(cluster: AdminSession) -> bool:
    """Disable auto-recovery, and return False if it was disabled already.

    The znode is shared with Java's AutoRecovery, and has no data.
    """
    with suppress(NodeExistsError):
        await cluster.store.create(cluster.paths.disable, with_parents=True)
        await cluster.note_order(order_event("disable"))
        return True
    return False


async def switch_on(cluster: AdminSession) -> bool:
    with suppress(NoNodeError):
        await cluster.store.delete(cluster.paths.disable)
        await cluster.note_order(order_event("enable"))
        return True
    return False


def _report(output: str, *, is_enabled: bool, has_changed: bool) -> None:
    if output == "json":
        click.echo(json.dumps({"is_enabled": is_enabled, "has_changed": has_changed}, indent=2))
        return
    state = "enabled" if is_enabled else "disabled"
    click.echo(f"auto-recovery is {'' if has_changed else 'already '}{state}")


async def set_recovery_delay(cluster: AdminSession, delay_s: int) -> None:
    """Store the recovery delay. The leader watches it, and starts an audit."""
    path, data = cluster.paths.recovery_delay, recovery_delay_to_bytes(delay_s)
    try:
        await cluster.store.create(path, data, with_parents=True)
    except NodeExistsError:
        await cluster.store.set(path, data, version=ANY_VERSION)
