"""``bookmender ledger``."""

import json
from pathlib import Path
from typing import Any

import click

from daemon.cli import LedgerId, config_option, output_option
from daemon.operating.idle_command import close, idle
from daemon.restore_command import earlier_metadata_hint, restore
from daemon.visit import Visit, run_visit
from ledgers.errors import CorruptionError
from ledgers.manager import VersionedMetadata
from ledgers.registration import BookieView


@click.group()
def ledger() -> None:
    """Single ledgers, by id."""


@ledger.command("show")
@click.argument("ledger_id", type=LedgerId())
@config_option
@output_option
def show(ledger_id: int, config: Path | None, output: str) -> None:
    """The metadata of one ledger, and which of its bookies are there.

    Exits 1 when there is no such ledger, or its metadata cannot be read.
    """

    async def look(cluster: Visit) -> tuple[VersionedMetadata, BookieView]:
        return await _read(cluster, ledger_id), await cluster.registration.read()

    found, view = run_visit(config, look)
    record = _record(found, view)
    click.echo(json.dumps(record, indent=2) if output == "json" else _text(record))


ledger.add_command(idle)
ledger.add_command(close)
ledger.add_command(restore)


async def _read(cluster: Visit, ledger_id: int) -> VersionedMetadata:
    try:
        return await cluster.manager.read(ledger_id)
    except CorruptionError as error:
        raise CorruptionError(f"{error}; {earlier_metadata_hint(ledger_id)}") from error


def _record(found: VersionedMetadata, view: BookieView) -> dict[str, Any]:
    metadata = found.metadata
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
            }
            for segment in metadata.segments
        ],
    }


def _text(record: dict[str, Any]) -> str:
    end = (
        f"last entry {record['last_entry_id']}, {record['length']} bytes"
        if record["last_entry_id"] is not None
        else "its end is not known"
    )
    lines = [
        f"ledger {record['ledger_id']}: {record['state']}, {end}",
        f"  E {record['ensemble_size']}, W {record['write_quorum']}, A {record['ack_quorum']}, "
        f"digest {record['digest_type'] or 'not stored'}, "
        f"metadata version {record['metadata_version']}, znode version {record['version']}",
    ]
    for segment in record["segments"]:
        members = (f"{b} (absent)" if b in segment["absent"] else b for b in segment["ensemble"])
        lines.append(f"  from entry {segment['first_entry_id']}: {', '.join(members)}")
    return "\n".join(lines)
