"""``bookmender ledger``: the group of commands about single ledgers, and ``ledger show``."""

import json
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from daemon.admin_session import AdminSession, run_in_session
from daemon.cli.bookies import registered_bookies
from daemon.cli.main import LazyGroup, LedgerId, config_option, output_option
from daemon.messages import earlier_metadata_hint, end_doubt_text, message
from daemon.words import printable
from ledgers.errors import CorruptionError
from ledgers.manager import VersionedMetadata
from ledgers.model import BookieId
from replication.cluster import ClusterView
from replication.ledger_record import UnprovenEnd, read_given_up, read_unproven_end
from replication.open_ledgers import end_doubts
from replication.orders import OrderStore
from replication.records import REWRITE_HINT

REFORMATTED = (
    "  Reformatted bookies may have lost their copies. To read all of these copies: "
    "bookmender repair {}"
)


CUSTOM_BYTES_MAX = 300
"""Longest value of custom metadata that is shown. Applications may store anything there."""

COMMANDS = {
    "idle": ("daemon.cli.idle:idle", "List open ledgers that get no more entries."),
    "close": ("daemon.cli.idle:close", "Recover and close an open ledger without writer."),
    "restore": ("daemon.cli.restore:restore", "Undo a recorded metadata write."),
}


@click.group(cls=LazyGroup, lazy=COMMANDS)
def ledger() -> None:
    """Show, close or restore single ledgers."""


@ledger.command("show")
@click.argument("ledger_id", type=LedgerId())
@config_option
@output_option
def show(ledger_id: int, config: Path | None, output: str) -> None:
    """Show a ledger's metadata and its bookies.

    Custom metadata often tells to what the ledger belongs: Pulsar stores the topic there.

    For each segment it shows which bookies are absent, and which were reformatted after the ledger
    was created (a closed ledger: after its metadata was last written). It also shows why the end
    may not be provable, and which entries an operator gave up.

    Exit code 1: there is no such ledger, or its metadata is unreadable.
    """

    async def look(cluster: AdminSession) -> dict[str, Any]:
        found = await _read(cluster, ledger_id)
        view = ClusterView(
            bookies=await registered_bookies(cluster),
            cookies=await cluster.registration.cookies(),
            orders=await OrderStore(cluster.store, cluster.paths).read(),
        )
        tried = await read_unproven_end(cluster.store, cluster.paths, ledger_id)
        given_up = await read_given_up(cluster.store, cluster.paths, ledger_id)
        unreadable = [
            path
            for path, stored in (
                (cluster.paths.waiting_note(ledger_id), tried),
                (cluster.paths.given_up(ledger_id), given_up),
            )
            if stored.is_unreadable
        ]
        return _record(found, view, tried.value) | {
            "given_up": None if given_up.value is None else asdict(given_up.value),
            "unreadable_records": unreadable,
        }

    record = run_in_session(config, look)
    click.echo(json.dumps(record, indent=2) if output == "json" else _text(record))


def _given_up_text(given_up: dict[str, Any]) -> str:
    at = datetime.fromtimestamp(given_up["at_ms"] / 1000, UTC).isoformat(timespec="seconds")
    return (
        f"entries {given_up['first_entry_id']} to {given_up['last_entry_id']} were given up by "
        f"{printable(given_up['by'])} at {at}: {printable(given_up['replies'])}"
    )


async def _read(cluster: AdminSession, ledger_id: int) -> VersionedMetadata:
    try:
        return await cluster.manager.read(ledger_id)
    except CorruptionError as error:
        raise CorruptionError(f"{error}; {earlier_metadata_hint(ledger_id)}") from error


def end_doubt(found: VersionedMetadata, view: ClusterView, tried: UnprovenEnd | None) -> str:
    """Return why the end of an open ledger may not be provable; empty if nothing speaks against
    it."""
    if found.metadata.is_closed:
        return ""
    if tried is not None:
        return message(found.ledger_id, tried.blocked).text
    doubts = end_doubts(found, view)
    return end_doubt_text(doubts) if doubts is not None else ""


def reformatted(found: VersionedMetadata, view: ClusterView) -> frozenset[BookieId]:
    """Return the bookies that were reformatted after the ledger was created.

    For a closed ledger the last metadata write counts instead: a bookie that was reformatted before
    that write may have joined by a repair, and then has all its entries.
    """
    return view.initialised_after(
        found.stat.mzxid if found.metadata.is_closed else found.stat.czxid
    )


def _record(
    found: VersionedMetadata, view: ClusterView, tried: UnprovenEnd | None
) -> dict[str, Any]:
    metadata, reformatted_bookies = found.metadata, reformatted(found, view)
    return {
        "ledger_id": found.ledger_id,
        "version": found.version,
        "state": metadata.state.name,
        "metadata_version": metadata.metadata_version,
        "ensemble_size": metadata.ensemble_size,
        "write_quorum": metadata.write_quorum,
        "ack_quorum": metadata.ack_quorum,
        "digest_type": metadata.digest_type.name if metadata.digest_type else None,
        "last_entry_id": metadata.last_entry_id if metadata.is_closed else None,
        "length": metadata.length if metadata.is_closed else None,
        "segments": [
            {
                "first_entry_id": segment.first_entry_id,
                "ensemble": list(segment.ensemble),
                "absent": [b for b in segment.ensemble if b not in view.available],
                "reformatted": [b for b in segment.ensemble if b in reformatted_bookies],
            }
            for segment in metadata.segments
        ],
        "end_doubt": end_doubt(found, view, tried) or None,
        "custom": {
            key: value[:CUSTOM_BYTES_MAX].decode(errors="replace") for key, value in metadata.custom
        },
    }


def _text(record: dict[str, Any]) -> str:
    end = (
        f"last entry {record['last_entry_id']}, {record['length']} bytes"
        if record["last_entry_id"] is not None
        else "last entry unknown"
    )
    lines = [
        f"ledger {record['ledger_id']}: {record['state']}, {end}",
        f"  E {record['ensemble_size']}, W {record['write_quorum']}, A {record['ack_quorum']}, "
        f"digest {record['digest_type'] or 'not stored'}, "
        f"metadata version {record['metadata_version']}, znode version {record['version']}",
    ]
    lines += [
        f"  {printable(key)}: {printable(value)}" for key, value in sorted(record["custom"].items())
    ]
    for segment in record["segments"]:
        members = (_member(bookie, segment) for bookie in segment["ensemble"])
        lines.append(f"  from entry {segment['first_entry_id']}: {', '.join(members)}")
    if any(segment["reformatted"] for segment in record["segments"]):
        lines.append(REFORMATTED.format(record["ledger_id"]))
    if record["end_doubt"]:
        lines.append(f"  {printable(record['end_doubt'])}")
    if record["given_up"]:
        lines.append(f"  {_given_up_text(record['given_up'])}")
    lines += [
        f"  its record {path} cannot be read; {REWRITE_HINT}"
        for path in record["unreadable_records"]
    ]
    return "\n".join(lines)


def _member(bookie: str, segment: dict[str, Any]) -> str:
    told = [state for state in ("absent", "reformatted") if bookie in segment[state]]
    return f"{bookie} ({', '.join(told)})" if told else bookie
