"""The cluster to which a folder of results belongs (``cluster.json``), and its positions in the
change feed (``state/clients.json``)."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from auditor.fsck.options import FeedChanges, Level
from ledgers.codec.layout import MetadataUri
from ledgers.errors import CorruptionError, SettingsError
from ledgers.plain_files import replace_file
from replication.records import decode_json

CLUSTER_FILE = "cluster.json"
CLIENTS_FILE = "clients.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A cluster. Ledger ids are meaningful within one cluster only. ``instance_id``: empty if the
    cluster has none; then the URI identifies it."""

    instance_id: str
    metadata_service_uri: str

    def is_same(self, other: "Cluster") -> bool:
        """True if both are the same cluster. The URI counts only if neither has an id: servers
        move, and have several names."""
        if self.instance_id or other.instance_id:
            return self.instance_id == other.instance_id
        return _place(self.metadata_service_uri) == _place(other.metadata_service_uri)

    def __str__(self) -> str:
        return f"{self.instance_id or 'cluster without an id'} ({self.metadata_service_uri})"


def _place(uri: str) -> tuple[str, str]:
    """Return the servers and the ledgers root. The same place has several URIs, for example with a
    layout or without."""
    try:
        parsed = MetadataUri.parse(uri)
    except SettingsError:  # a user edited the file
        return uri, ""
    return parsed.hosts, parsed.root


def keep_cluster(folder: Path, cluster: Cluster) -> None:
    """Store the cluster, or its present URI, before a run writes to the folder. Raises
    SettingsError if the results belong to another cluster."""
    check_cluster(folder, cluster)
    replace_file(folder / CLUSTER_FILE, json.dumps(asdict(cluster), indent=2) + "\n")


def check_cluster(folder: Path, cluster: Cluster) -> None:
    """Raise SettingsError if the results belong to another cluster, or if that is unreadable."""
    try:
        known = decode_json((folder / CLUSTER_FILE).read_bytes(), Cluster)
    except FileNotFoundError:  # before the first run
        return
    except (OSError, CorruptionError) as error:
        raise SettingsError(f"{folder / CLUSTER_FILE}: cannot be read: {error}") from error
    if not known.is_same(cluster):
        raise SettingsError(
            f"{folder} contains results of cluster {known}, not of {cluster}. Use another folder"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientPosition:
    """How far the results in this folder follow a client of the feed.

    ``position``: the id of a checkpoint. Every change up to it was checked at ``level``, or the
    client is told of a later change of the same ledger. ``generation``: of the feed. ``log``: the
    ledger of the log that has the checkpoint; None: not known, or an earlier release wrote it.
    """

    level: Level
    generation: int
    position: int
    log: tuple[int, int, int] | None = None

    @classmethod
    def after(cls, changes: FeedChanges, level: Level) -> "ClientPosition":
        """Return the position of a run that has checked the changes."""
        generation, position = changes.generation, changes.position
        return cls(level=level, generation=generation, position=position, log=changes.log)


def read_positions(state: Path) -> dict[str, ClientPosition]:
    """Return the positions from the ``state`` folder, by client. Empty if the file is unreadable:
    then a run checks all ledgers."""
    try:
        return decode_json((state / CLIENTS_FILE).read_bytes(), dict[str, ClientPosition])
    except (FileNotFoundError, CorruptionError):
        return {}


def keep_position(state: Path, client: str, position: ClientPosition) -> None:
    """Store the position of one client."""
    positions = {**read_positions(state), client: position}
    stored = {name: {**asdict(each), "level": each.level.value} for name, each in positions.items()}
    state.mkdir(parents=True, exist_ok=True)
    replace_file(state / CLIENTS_FILE, json.dumps(stored, indent=2) + "\n")
