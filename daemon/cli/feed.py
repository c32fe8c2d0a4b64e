"""``bookmender feed``: shows, enables and disables the feed of all changes of ledgers.

While the feed is enabled, the leader writes every change of ledger metadata to ledgers of its own.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from auditor.election import current_leader
from checkpoints.chain import (
    RETENTION_DEFAULT_S,
    FeedChain,
    order_change,
    read_chain,
)
from checkpoints.client import IN_ZOOKEEPER
from checkpoints.model import Checkpoint
from daemon.admin_session import AdminSession, order_event, run_in_session, shared_clock
from daemon.cli.feed_clients import ClientRow, confirm_deletion, opened_feed, read_clients
from daemon.cli.feed_stall import FeedStall, read_stall
from daemon.cli.main import EXIT_FAILED, LazyGroup, config_option, output_option
from daemon.cli.option_types import Duration
from daemon.words import counted, duration_text, printable
from ledgers.clock import Clock, SystemClock
from ledgers.errors import BookmenderError
from replication.nodes import live_nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedState:
    """The feed as its chain and its log show it.

    ``last``: the last checkpoint; None if there is none, or if it cannot be read. ``leader``: may
    be Java's. ``clients``: those whose receipts are in ZooKeeper. ``error``: why the chain, the log
    or the clients cannot be read; empty if they can. ``stall``: why nothing is published.
    """

    chain: FeedChain | None
    last: Checkpoint | None = None
    leader: str | None = None
    clients: Sequence[ClientRow] = ()
    error: str = ""
    stall: FeedStall | None = None

    def to_json(self) -> dict[str, Any]:
        chain, last = self.chain, self.last
        return {
            "is_enabled": chain is not None and chain.is_enabled,
            "generation": 0 if chain is None else chain.generation,
            "changed_ms": chain.changed_ms if chain is not None and chain.changed_ms else None,
            "changed_by": "" if chain is None else chain.by,
            "retention_s": None if chain is None else chain.retention_s,
            "leader": self.leader,
            "log_ledgers": [] if chain is None else [each.ledger_id for each in chain.logs],
            "base_ledger": None if chain is None or chain.base is None else chain.base.ledger_id,
            "oldest_previous_id": chain.logs[0].previous_id if chain and chain.logs else None,
            "last_checkpoint_id": None if last is None else last.id,
            "last_checkpoint_ms": None if last is None else last.time_ms,
            "lost_ledger": None if chain is None else chain.lost_ledger_id,
            "begun_again_ms": None if chain is None else chain.renewed_ms or None,
            "stall": None if self.stall is None else self.stall.to_json(),
            "deleting_count": 0 if chain is None else len(chain.deleting),
            "clients": [each.to_json() for each in self.clients],
            "error": self.error,
        }

    def to_text(self, *, now_ms: int) -> str:
        lines = [self._state_text(now_ms)]
        if self.chain is not None and self.chain.is_enabled:
            lines.append(self._log_text(now_ms))
            if self.chain.renewed_ms:
                lines.append(self._renewal_text(now_ms))
            if self.stall is not None:
                lines += [self.stall.fact(now_ms=now_ms), f"    {self.stall.action()}"]
        lines += [each.to_text() for each in self.clients]
        if self.error:
            lines.append(f"The feed cannot be read: {printable(self.error)}")
        return "\n".join(lines)

    def _state_text(self, now_ms: int) -> str:
        chain = self.chain
        if chain is None:
            return "It is not known whether the feed is enabled."
        if not chain.is_enabled:
            deleting = len(chain.deleting)
            if deleting:
                return (
                    f"The feed is disabled. The leader still deletes {counted(deleting, 'ledger')}."
                )
            return "The feed is disabled. Enable it: bookmender feed enable."
        since = duration_text((now_ms - chain.changed_ms) / 1000)
        return (
            f"The feed has been enabled for {since} by {printable(chain.by)}. "
            f"Its log keeps {duration_text(chain.retention_s)}."
        )

    def _renewal_text(self, now_ms: int) -> str:
        assert self.chain is not None
        age = duration_text((now_ms - self.chain.renewed_ms) / 1000)
        because = f"its ledger {self.chain.lost_ledger_id} was lost"
        if self.chain.is_after_restore:
            because = "ZooKeeper was restored from a backup"
        return (
            f"The feed began again {age} ago, because {because}. Its clients must compare their "
            "state with all ledgers."
        )

    def _log_text(self, now_ms: int) -> str:
        assert self.chain is not None
        count = len(self.chain.logs)
        if not count:
            if self.leader is None:
                return "No log yet, because no node leads. Start a node: bookmender daemon."
            return f"The leader {printable(self.leader)} has not begun the log yet."
        ledgers = f"Log: {counted(count, 'ledger')}"
        base = self.chain.base
        ledgers += "." if base is None else f", base in ledger {base.ledger_id}."
        if self.last is None:
            return f"{ledgers} It has no checkpoint yet."
        age = duration_text((now_ms - self.last.time_ms) / 1000)
        text = f"{ledgers} The last change was published {age} ago (checkpoint {self.last.id:#x})."
        if self.leader is None:
            text += "\nNo node leads, so no change is published. Start a node: bookmender daemon."
        return text


async def read_feed(cluster: AdminSession) -> FeedState:
    """Read chain and log. Raises UnavailableError if ZooKeeper does not answer."""
    stored = await read_chain(cluster.store, cluster.paths)
    leading = await current_leader(cluster.store, cluster.paths)
    leader = None if leading is None else leading.candidate
    if stored.error is not None:
        return FeedState(chain=None, leader=leader, error=str(stored.error))
    chain = stored.value or FeedChain(is_enabled=False, generation=0, changed_ms=0)
    nodes = {node.session_id for node in await live_nodes(cluster.store, cluster.paths)}
    stall = await read_stall(
        cluster.store,
        cluster.paths,
        leader_session_id=None if leading is None else leading.session_id,
        is_java_leader=leading is not None and leading.session_id not in nodes,
    )
    if not chain.logs:
        return FeedState(chain=chain, leader=leader, stall=stall)
    last: Checkpoint | None = None
    try:
        last = await _last_checkpoint(cluster, chain)
        clients = await read_clients(cluster, IN_ZOOKEEPER) if chain.is_enabled else ()
    except BookmenderError as error:
        return FeedState(chain=chain, leader=leader, last=last, error=str(error), stall=stall)
    return FeedState(chain=chain, leader=leader, last=last, clients=clients, stall=stall)


async def _last_checkpoint(cluster: AdminSession, chain: FeedChain) -> Checkpoint | None:
    async with opened_feed(cluster) as ledgers:
        for segment in reversed(chain.logs):
            opened = await ledgers.open(segment.ledger_id)
            found = None if opened is None else await ledgers.last_checkpoint(opened)
            if found is not None:
                return found[1]
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Enabled:
    """``has_changed``: the feed was disabled before. ``retention_s``: how long changes are kept."""

    has_changed: bool
    retention_s: int


async def enable_feed(cluster: AdminSession, *, retention_s: int | None, clock: Clock) -> Enabled:
    """Enable the feed. If it is enabled already, only change its retention.

    ``retention_s``: None: an enabled feed keeps its retention; a new one has the default.
    """
    has_changed = False

    def change(chain: FeedChain) -> FeedChain:
        nonlocal has_changed
        has_changed = not chain.is_enabled
        if chain.is_enabled:
            return chain.with_retention(chain.retention_s if retention_s is None else retention_s)
        now_ms = clock.wall_ms()
        return chain.enabled(
            now_ms=now_ms,
            by=cluster.by,
            retention_s=RETENTION_DEFAULT_S if retention_s is None else retention_s,
            generation_min=now_ms // 1000,
        )

    chain = await order_change(cluster.store, cluster.paths, change)
    await cluster.note_order(order_event("feed enable"))
    return Enabled(has_changed=has_changed, retention_s=chain.retention_s)


async def disable_feed(cluster: AdminSession, *, clock: Clock) -> bool:
    """Disable the feed, and return False if it was disabled already. The leader deletes its
    ledgers."""
    stored = await read_chain(cluster.store, cluster.paths)
    if stored.error is None and (stored.value is None or not stored.value.is_enabled):
        return False
    await order_change(
        cluster.store,
        cluster.paths,
        lambda chain: chain.disabled(now_ms=clock.wall_ms(), by=cluster.by),
    )
    await cluster.note_order(order_event("feed disable"))
    return True


COMMANDS = {
    "follow": ("daemon.cli.feed_follow:follow_command", "Print changed ledgers, or run a command."),
    "clients": ("daemon.cli.feed_clients:clients", "Show how far the clients are behind."),
    "failures": ("daemon.cli.feed_clients:failures", "Show or retry the failures of a client."),
    "forget": ("daemon.cli.feed_clients:forget", "Delete the receipts of a client."),
}


@click.group(cls=LazyGroup, lazy=COMMANDS)
def feed() -> None:
    """Follow all changes of ledger metadata.

    \b
      bookmender feed enable                  the leader begins to write it
      bookmender feed status                  show whether it is written, and its clients
      bookmender feed follow --client NAME    print each changed ledger
      bookmender feed clients                 show how far the clients are behind
      bookmender feed disable                 end it, and delete its ledgers

    The leader writes each change to ledgers in BookKeeper, on up to three bookies. So programs
    learn which ledgers changed, without listing all of them. Its failures never delay a repair.
    """


@feed.command()
@config_option
@output_option
def status(config: Path | None, output: str) -> None:
    """Show the state and the clients of the feed.

    For clients with receipts in a database: bookmender feed clients --store URL.

    Exit codes: 0 it can be read, or it is disabled. 1 it cannot be read.
    """
    state = run_in_session(config, read_feed)
    if output == "json":
        click.echo(json.dumps(state.to_json(), indent=2))
    else:
        click.echo(state.to_text(now_ms=SystemClock().wall_ms()))
    sys.exit(EXIT_FAILED if state.error else 0)


@feed.command()
@config_option
@output_option
@click.option(
    "--retention",
    "retention_s",
    type=Duration(),
    help="How long changes are kept, up to 30d.  [default: unchanged; 7d for a new feed]",
)
def enable(config: Path | None, output: str, retention_s: int | None) -> None:
    """Enable the feed. The first checkpoints contain all ledgers that exist.

    If the feed is enabled already, --retention changes its retention.
    """

    async def act(cluster: AdminSession) -> Enabled:
        clock = await shared_clock(cluster)
        return await enable_feed(cluster, retention_s=retention_s, clock=clock)

    done = run_in_session(config, act)
    kept = duration_text(done.retention_s)
    if not done.has_changed:
        text = f"The feed is already enabled. It keeps changes for {kept}."
    else:
        text = (
            f"The feed is enabled. It keeps changes for {kept}.\n"
            "Follow it: bookmender feed follow --client NAME --from-start"
        )
    _report(output, text, is_enabled=True, has_changed=done.has_changed)


@feed.command()
@click.option("--yes", is_flag=True, help="Do not ask.")
@config_option
@output_option
def disable(yes: bool, config: Path | None, output: str) -> None:
    """Disable the feed. The leader deletes its ledgers.

    After the next bookmender feed enable, each client gets all ledgers again. It is not told which
    ledgers were deleted in the meantime.
    """
    confirm_deletion("the feed, whose clients must then begin again", yes=yes)

    async def act(cluster: AdminSession) -> bool:
        return await disable_feed(cluster, clock=await shared_clock(cluster))

    has_changed = run_in_session(config, act)
    text = "The feed is disabled." if has_changed else "The feed is already disabled."
    _report(output, text, is_enabled=False, has_changed=has_changed)


def _report(output: str, text: str, *, is_enabled: bool, has_changed: bool) -> None:
    if output == "json":
        text = json.dumps({"is_enabled": is_enabled, "has_changed": has_changed}, indent=2)
    click.echo(text)
