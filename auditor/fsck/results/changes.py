"""Changes that the feed told an unfinished run: ``changes.parquet`` in its state.

This package knows nothing of the feed itself: ``daemon.fsck.changes`` follows it.
"""

import json
from array import array
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from auditor.fsck.options import FeedChanges
from auditor.fsck.results.tables import read_note, replace_table

CHANGES = pa.schema(
    [("ledger_id", pa.int64()), ("version", pa.uint64()), ("is_deleted", pa.bool_())]
)
_NOTE = "bookmender.changes"
_LOG_NOTE = "bookmender.changes.log"
"""A note of its own: earlier releases refuse unknown keys in the other one, and write none."""


def write_changes(path: Path, changes: FeedChanges) -> None:
    rows = pa.table(
        {
            "ledger_id": pa.array(changes.ledger_ids, pa.int64()),
            "version": pa.array(changes.versions, pa.uint64()),
            "is_deleted": pa.array(map(bool, changes.are_deleted), pa.bool_()),
        },
        schema=CHANGES,
    )
    head = {
        "client": changes.client,
        "generation": changes.generation,
        "position": changes.position,
        "is_whole": changes.is_whole,
    }
    replace_table(path, rows, note={_NOTE: json.dumps(head), _LOG_NOTE: json.dumps(changes.log)})


def read_changes(path: Path) -> FeedChanges | None:
    """Return the changes of an unfinished run; None if it does not follow the feed."""
    if not path.exists():
        return None
    rows = pq.read_table(path, schema=CHANGES)
    log = json.loads(read_note(path, _LOG_NOTE, default="null"))
    return FeedChanges(
        **json.loads(read_note(path, _NOTE)),
        log=tuple(log) if log else None,
        ledger_ids=array("q", rows["ledger_id"].to_pylist()),
        versions=array("Q", rows["version"].to_pylist()),
        are_deleted=bytes(rows["is_deleted"].to_pylist()),
    )
