"""Orders for the whole cluster: ``bookmender limits``, ``hold``, ``disable``, ``enable`` and
``recovery-delay``."""

import sys
from pathlib import Path

import click

from daemon.admin_session import AdminSession, shared_clock
from daemon.cli.main import EXIT_FAILED, cluster_options
from daemon.cli.option_types import Duration, Limit, ReasonText
from daemon.cli.output import echo
from daemon.cli.progress import echo_notes
from daemon.cli.session import run_in_session
from daemon.operations.history import time_text
from daemon.operations.holds import HoldStateRecord, begin_hold, read_hold, release_hold
from daemon.operations.limits import Limits, change_limits, concerns, effective_limits, limit_text
from daemon.operations.orders import leader_concerns, unreadable_texts
from daemon.operations.switch import (
    RecoveryDelay,
    SwitchRecord,
    read_recovery_delay,
    set_recovery_delay,
    switch_off,
    switch_on,
)
from daemon.words import duration_text
from ledgers.clock import Clock, SystemClock
from replication.orders import LimitsOrder, OrderStore, limits_znode

# --- Limits ---------------------------------------------------------------------------------------


@click.command()
@cluster_options
@click.option("--bytes-per-s", type=Limit("bytes_per_s"), help="Copied bytes. 0: no limit.")
@click.option("--entries-per-s", type=Limit("entries_per_s"), help="Copied entries. 0: no limit.")
@click.option(
    "--reads-in-flight",
    type=Limit("reads_in_flight_per_bookie"),
    help="Reads in flight for each bookie.",
)
@click.option(
    "--requests-per-s", type=Limit("requests_per_s"), help="Requests to ZooKeeper. 0: no limit."
)
@click.option(
    "--full-speed",
    is_flag=True,
    help="Do not yield to clients.",
)
@click.option("--gentle", is_flag=True, help="Yield where clients are active (default).")
@click.option("--reset", is_flag=True, help="Withdraw all ordered limits first.")
def limits(
    config: Path | None,
    output: str,
    bytes_per_s: int | None,
    entries_per_s: int | None,
    reads_in_flight: int | None,
    requests_per_s: int | None,
    full_speed: bool,
    gentle: bool,
    reset: bool,
) -> None:
    """Show or set the limits of all nodes.

    \b
      bookmender limits                      show them
      bookmender limits --bytes-per-s 50M    change one, on all nodes at once
      bookmender limits --reset              use each node's own settings again

    The limits override the settings of the nodes. Each number applies to one node: ten nodes copy
    ten times as much. Without an order, this host's settings are shown; other nodes may differ.

    Exit code 1: the order cannot be read. Nodes then keep the limits they had.
    """
    if full_speed and gentle:
        raise click.UsageError("Give --full-speed or --gentle, not both.")
    wanted = LimitsOrder(
        bytes_per_s=bytes_per_s,
        entries_per_s=entries_per_s,
        reads_in_flight_per_bookie=reads_in_flight,
        requests_per_s=requests_per_s,
        yields_to_writers=gentle if full_speed or gentle else None,
    )

    async def act(cluster: AdminSession) -> tuple[Limits, bool]:
        if reset or wanted != LimitsOrder():
            return await change_limits(cluster, wanted, reset=reset), False
        path = limits_znode(cluster.paths).path
        orders = await OrderStore(cluster.store, cluster.paths).read()
        is_unreadable = path in orders.unreadable
        echo_notes(unreadable_texts([path] if is_unreadable else []))
        return effective_limits(orders.limits, cluster.settings), is_unreadable

    found, is_unreadable = run_in_session(config, act)
    echo_notes(concerns(found))
    echo(output, found, "\n".join(limit_text(key, limit) for key, limit in found.items()))
    sys.exit(EXIT_FAILED if is_unreadable else 0)


# --- The safety hold ------------------------------------------------------------------------------


@click.command()
@cluster_options
@click.option("--begin", "begins", is_flag=True, help="Begin a hold, or replace the present one.")
@click.option("--end", "ends", is_flag=True, help="End it. Absent bookies then count as lost.")
@click.option(
    "--for", "duration_s", type=Duration(), help="With --begin: from now, such as 30m, 2h, 1d."
)
@click.option("--reason", type=ReasonText(), default="", help="With --begin: shown with the hold.")
@click.option("--yes", is_flag=True, help="With --end: even if bookies are absent.")
def hold(
    config: Path | None,
    output: str,
    begins: bool,
    ends: bool,
    duration_s: int | None,
    reason: str,
    yes: bool,
) -> None:
    """Show, begin or end the safety hold.

    \b
      bookmender hold                    is there a hold, and why?
      bookmender hold --begin --for 2h   before work on the network
      bookmender hold --end              end it, unless bookies are absent
      bookmender hold --end --yes        end it: absent bookies count as lost

    A hold pauses marking and fencing. The leader begins a hold by itself when many bookies
    disappear at once ([hold] in the settings). It ends that hold soon after the bookies return, or
    after hold.lasts_s. Without --for an operator's hold lasts until --end. Marked ledgers are still
    repaired. Bring bookies back before you end a hold, or give them a window with bookmender bookie
    maintenance.

    Exit codes: 0 no hold, or done. 1 a hold, also an unreadable one; with --end: bookies are absent
    and --yes is missing, so nothing was changed.
    """
    if begins and ends:
        raise click.UsageError("Give --begin or --end, not both.")
    if not begins and (duration_s is not None or reason):
        raise click.UsageError(f"{'--reason' if reason else '--for'} needs --begin.")
    if yes and not ends:
        raise click.UsageError("--yes needs --end.")

    async def act(cluster: AdminSession) -> tuple[HoldStateRecord, bool]:
        clock: Clock = SystemClock()
        if begins or ends:
            clock = await shared_clock(cluster)
        if ends:
            return await release_hold(cluster, accepts_lost=yes, clock=clock)
        if begins:
            await begin_hold(cluster, duration_s=duration_s, reason=reason, clock=clock)
        state = await read_hold(cluster, clock=clock)
        if state.hold is not None:
            echo_notes(await leader_concerns(cluster, "holds"))
        return state, False

    state, is_refused = run_in_session(config, act)
    echo(output, state, state.to_text(now_ms=SystemClock().wall_ms()))
    echo_notes(unreadable_texts(state.unreadable_orders))
    if is_refused:
        click.echo(
            "Nothing was changed, because bookies are absent. With --yes the hold ends, and the "
            "ledgers of absent bookies that are neither in maintenance nor draining are marked.",
            err=True,
        )
    is_held = state.hold is not None and not (begins or ends)
    sys.exit(EXIT_FAILED if is_refused or is_held else 0)


# --- Auto-recovery --------------------------------------------------------------------------------


@click.command()
@cluster_options
@click.option("--for", "duration_s", type=Duration(), help="Enable it again after: 30m, 2h, 1d.")
@click.option("--reason", type=ReasonText(), default="", help="Shown in the history.")
def disable(config: Path | None, output: str, duration_s: int | None, reason: str) -> None:
    """Disable auto-recovery in the whole cluster.

    \b
      bookmender disable --for 2h --reason "new switch"

    Use this before planned work that stops many bookies. It also holds for Java's AutoRecovery. No
    ledger is marked or leased until bookmender enable, or until a bookmender leader enables it when
    the time of --for is over. Repairs in progress are completed. Without --for, bookmender status
    warns meanwhile.

    The exit code is 0 even if auto-recovery was already disabled.
    """

    async def act(cluster: AdminSession) -> SwitchRecord:
        return await switch_off(cluster, duration_s=duration_s, reason=reason)

    _print_switched(run_in_session(config, act), output)


@click.command()
@cluster_options
def enable(config: Path | None, output: str) -> None:
    """Enable auto-recovery again.

    Ledgers of bookies that were lost in the meantime are marked and repaired.

    The exit code is 0 even if auto-recovery was already enabled.
    """
    _print_switched(run_in_session(config, switch_on), output)


def _print_switched(switched: SwitchRecord, output: str) -> None:
    state = "enabled" if switched.is_enabled else "disabled"
    already = "" if switched.has_changed else "already "
    end = "" if switched.until_ms is None else f" until {time_text(switched.until_ms)}"
    echo(output, switched, f"auto-recovery is {already}{state}{end}")


@click.command("recovery-delay")
@click.argument("delay_s", metavar="[DURATION]", type=Duration(least_s=0), required=False)
@cluster_options
def recovery_delay(delay_s: int | None, config: Path | None, output: str) -> None:
    """Show or set how long a bookie may be absent.

    \b
      bookmender recovery-delay        show it
      bookmender recovery-delay 30s    set it; 0s: a bookie is lost at once

    A bookie that is absent for longer is lost: its ledgers are marked and copied to other bookies.
    The delay is stored where Java's AutoRecovery reads it (lostBookieRecoveryDelay). Setting it
    starts an audit.
    """

    async def act(cluster: AdminSession) -> RecoveryDelay:
        if delay_s is not None:
            await set_recovery_delay(cluster, delay_s)
        return RecoveryDelay(recovery_delay_s=await read_recovery_delay(cluster))

    found = run_in_session(config, act)
    text = "the recovery delay is not set, because no auditor has ever run"
    if found.recovery_delay_s is not None:
        text = f"a bookie is lost after an absence of {duration_text(found.recovery_delay_s)}"
    echo(output, found, text)
