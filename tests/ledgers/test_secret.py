"""Secrets are shown nowhere, and still reach the executors of Spark."""

import json
import pickle
import traceback
from dataclasses import replace

import pytest

from auditor.fsck.options import FsckOptions
from checkpoints.spark import StreamOptions
from daemon.cli.feed_follow import FollowOptions
from ledgers.codec.metadata import parse_metadata, serialize_metadata
from ledgers.errors import CorruptionError
from ledgers.manager import VersionedMetadata
from ledgers.model import BookieId, LedgerMetadata, Segment
from ledgers.secret import Secret
from ledgers.store import Create, SetData, Stat
from ledgers.wire.messages import Add, Read
from ledgers.wire.sasl import Credentials
from ledgers.writing import LedgerOptions
from replication.settings import ReplicationSettings

URI = "zk://zk1:2181/ledgers"
DATA = b"hunter2-------------"
METADATA = LedgerMetadata(
    ensemble_size=1,
    write_quorum=1,
    ack_quorum=1,
    password=DATA,
    segments=(Segment(first_entry_id=0, ensemble=(BookieId("b1:3181"),)),),
)


@pytest.mark.parametrize(
    "holder",
    [
        Secret("hunter2"),
        ReplicationSettings(default_password=Secret("hunter2")),
        FsckOptions(metadata_service_uri=URI, default_password=Secret("hunter2")),
        StreamOptions.parse(
            {"metadataServiceUri": URI, "client": "a", "store": "postgresql://a:hunter2@db/feed"}
        ),
        FollowOptions(name="a", store=Secret("postgresql://a@db/feed?password=hunter2")),
        Credentials(user="a", password=Secret("hunter2")),
        LedgerOptions(password=DATA),
        METADATA,
        VersionedMetadata(ledger_id=1, metadata=METADATA, stat=Stat(version=0), data=DATA),
        Create(path="/a", data=DATA),
        SetData(path="/a", data=DATA, version=0),
        Read(ledger_id=1, entry_id=0, fencing_key=DATA),
        Add(entry=bytes(32), master_key=DATA),
    ],
    ids=lambda holder: type(holder).__name__,
)
def test_a_secret_is_not_shown(holder: object) -> None:
    assert "hunter2" not in f"{holder} {holder!r}"


def test_a_secret_is_no_json() -> None:
    with pytest.raises(TypeError):
        json.dumps(Secret("hunter2"))


def test_a_secret_reaches_executors() -> None:
    options = FsckOptions(metadata_service_uri=URI, default_password=Secret("hunter2"))

    received = pickle.loads(pickle.dumps(options))

    assert received == options
    assert received.default_password.reveal() == "hunter2"


@pytest.mark.parametrize("version", [2, 3])
def test_damaged_metadata_does_not_show_the_password(version: int) -> None:
    data = serialize_metadata(replace(METADATA, metadata_version=version))
    shown = []
    for index in range(len(data)):
        for other in (b"", b'"', b"\\", b"\xff"):
            try:
                parse_metadata(data[:index] + other + data[index + 1 :])
            except CorruptionError as error:
                shown += traceback.format_exception(error)

    assert "unter" not in "".join(shown)
