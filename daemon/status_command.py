"""``bookmender status``."""

import json
import sys
import time
from pathlib import Path

import click

from daemon.cli import config_option, output_option
from daemon.status import Status, gather_status
from daemon.visit import run_visit


@click.command()
@config_option
@output_option
def status(config: Path | None, output: str) -> None:
    """What is at risk, who works on it, and what waits and why.

    Exits 0 when the cluster is whole, 1 when something is marked or lost, 3 when it could not tell.
    """
    found = run_visit(config, gather_status)
    if output == "json":
        click.echo(json.dumps(found.to_json(), indent=2))
    else:
        click.echo(render(found, now_ms=time.time_ns() // 1_000_000))
    sys.exit(0 if found.verdict == "whole" else 1)


def render(found: Status, *, now_ms: int) -> str:
    """The same for people, a fact a line."""
    lines = [
        f"verdict   {found.verdict}"
        + (" (auto-recovery is disabled)" if found.is_disabled else ""),
        f"leader    {_leader(found)}",
        f"nodes     {_nodes(found)}",
        f"bookies   {len(found.writable)} writable, {len(found.read_only)} read-only, "
        f"{len(found.lost)} lost" + "".join(f"\n          lost: {b}" for b in found.lost),
        f"queue     {found.marked_count} ledgers marked, {found.under_repair} locked for repair, "
        f"{found.waiting_count} waiting",
    ]
    lines += [
        f"          {count} missing {missing} {'bookie' if missing == 1 else 'bookies'}"
        for missing, count in found.by_missing
    ]
    if found.waiting:
        lines.append("waiting")
    for note in found.waiting:
        age_s = max(0, now_ms - note.since_ms) // 1000
        lines.append(f"  ledger {note.ledger_id}: {note.reason.value} for {age_s} s: {note.detail}")
    if found.waiting_count > len(found.waiting):
        lines.append(f"  … and {found.waiting_count - len(found.waiting)} more")
    return "\n".join(lines)


def _leader(found: Status) -> str:
    if found.leader is None:
        return "none: no auditor is running"
    node = found.leader_node
    return f"{found.leader} (pid {node.pid})" if node else f"{found.leader} (Java's AutoRecovery)"


def _nodes(found: Status) -> str:
    processes: dict[tuple[str, int], list[str]] = {}
    for node in found.nodes:
        processes.setdefault((node.host, node.pid), []).append(node.half.value)
    shown = ", ".join(
        f"{host} (pid {pid}: {' and '.join(halves)})" for (host, pid), halves in processes.items()
    )
    return shown or "none: start one with bookmender daemon"
