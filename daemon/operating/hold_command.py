"""``bookmender hold``."""

import json
import sys
from pathlib import Path

import click

from daemon.cli import EXIT_FAILED, config_option, output_option
from daemon.operating.hold import HoldState, begin_hold, end_hold, read_hold
from daemon.operating.java_leader import leader_concerns
from daemon.operating.progress import tell
from daemon.operating.unreadable_orders import unreadable_texts
from daemon.option_types import Duration, ReasonText
from daemon.visit import Visit, run_visit, shared_clock
from ledgers.clock import Clock, SystemClock


class _ShowingGroup(click.Group):
    """Without the name of one of its commands it means ``show``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or (args[0].startswith("-") and args[0] not in self.get_help_option_names(ctx)):
            args = ["show", *args]
        return super().parse_args(ctx, args)


@click.group(cls=_ShowingGroup)
def hold() -> None:
    """The safety hold: no further ledger is marked for lost bookies, and nothing is fenced, by any
    node.

    \b
      bookmender hold                               whether one stands, and why
      bookmender hold begin --for 2h --reason "…"   before work on the network
      bookmender hold end                           ends it, unless bookies are away: then it shows them
      bookmender hold end --yes                     ends it in any case: those are lost

    The leader begins one by itself when so many bookies go at once that it is hardly they who
    failed (section [hold] of the settings). What was marked before is repaired meanwhile, but for
    ledgers that would have to be fenced.

    \b
    It ends
      by hand       at any time: bookmender hold end
      in time       after hold.lasts_s; an operator's after --for, if that was given
      by itself     soon after enough of its bookies are back; not an operator's

    Whoever is away at its end is lost, at once if the recovery delay is over by then: their ledgers
    are marked and copied elsewhere, open ones fenced. So bring bookies back first. For those that
    come later, bookmender bookie maintenance ID --for 2h says that they are away on purpose.

    With the default recovery delay of 0 the first bookies of a wave are marked before the others
    are gone. One of some seconds, longer than ZooKeeper's session time-outs lie apart (30 s, say),
    lets the hold see a wave before the first mark: the znode lostBookieRecoveryDelay, or in a new
    cluster auditor.lost_bookie_recovery_delay_s.
    """


@hold.command()
@config_option
@output_option
def show(config: Path | None, output: str) -> None:
    """Whether a hold stands, since when and why. Exits 1 if so, 0 if not. One that cannot be read
    stands."""
    state = run_visit(config, lambda cluster: _read(cluster, SystemClock()))
    _print(state, output)
    sys.exit(0 if state.hold is None else EXIT_FAILED)


@hold.command()
@config_option
@output_option
@click.option("--for", "duration_s", type=Duration(), help="From now on, as in 30m, 2h or 1d.")
@click.option("--reason", type=ReasonText(), default="", help="For people who see the hold.")
def begin(config: Path | None, output: str, duration_s: int | None, reason: str) -> None:
    """Hold everything from now on, whatever the bookies do. It takes the place of one that stands.

    Without --for until it is ended by hand. Bookies that are still away at its own end are lost
    then, unless they are so many that the leader holds on their account.
    """

    async def act(cluster: Visit) -> HoldState:
        clock = await shared_clock(cluster)
        await begin_hold(cluster, duration_s=duration_s, reason=reason, clock=clock)
        return await _read(cluster, clock)

    _print(run_visit(config, act), output)


@hold.command()
@config_option
@output_option
@click.option(
    "--yes", is_flag=True, help="Do it though bookies are away. Without it that is shown."
)
def end(config: Path | None, output: str, yes: bool) -> None:
    """End the hold: whoever is away now is lost, once the recovery delay is over.

    Their ledgers are marked and copied elsewhere, and open ones fenced. Nothing holds again on
    their account until they were back; a further wave of others does. That nothing is held is no
    error.

    Exits 1 when bookies are away and --yes was not given: nothing was changed then.
    """

    async def act(cluster: Visit) -> tuple[HoldState, bool]:
        clock = await shared_clock(cluster)
        before = await read_hold(cluster, clock=clock)
        if before.hold is None or (before.away and not yes):
            return before, False
        has_ended = await end_hold(cluster, before.away, clock=clock)
        return await read_hold(cluster, clock=clock), has_ended

    state, has_ended = run_visit(config, act)
    _print(state, output)
    if state.hold is not None and not has_ended:
        click.echo(
            "nothing was changed: with --yes the ledgers of those that are away, and not under maintenance, "
            "are marked",
            err=True,
        )
        sys.exit(EXIT_FAILED)


async def _read(cluster: Visit, clock: Clock) -> HoldState:
    """And tell who does not keep to one that stands."""
    state = await read_hold(cluster, clock=clock)
    if state.hold is not None:
        tell(await leader_concerns(cluster, "holds"))
    return state


def _print(state: HoldState, output: str) -> None:
    if output == "json":
        click.echo(json.dumps(state.to_json(), indent=2))
    else:
        click.echo(state.to_text(now_ms=SystemClock().wall_ms()))
    if state.unreadable:
        tell(unreadable_texts([state.unreadable]))
