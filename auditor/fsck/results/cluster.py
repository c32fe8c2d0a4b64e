"""The cluster that a folder of results belongs to: ``cluster.json``, and ``racks.json`` with the
racks of its bookies. The first run writes them, and each later one updates the URI and the racks.

Ledger ids are meaningful within one cluster only. Results of another cluster are never
marked.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from auditor.fsck.results.files import replace_file
from ledgers.codec.layout import MetadataUri
from ledgers.errors import CorruptionError, SettingsError
from ledgers.model import BookieId
from replication.records import decode_json

CLUSTER_FILE = "cluster.json"
RACKS_FILE = "racks.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A cluster. ``instance_id``: empty if the cluster has none; then the URI identifies it."""

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
    except SettingsError:  # somebody edited the file
        return uri, ""
    return parsed.hosts, parsed.root


def keep_cluster(folder: Path, cluster: Cluster) -> None:
    """Store the cluster, before a run writes to the folder. Raises SettingsError if the results
    belong to another cluster."""
    check_cluster(folder, cluster)
    replace_file(folder / CLUSTER_FILE, json.dumps(asdict(cluster), indent=2) + "\n")


def check_cluster(folder: Path, cluster: Cluster) -> None:
    """Raise SettingsError if the results belong to another cluster."""
    known = read_cluster(folder)
    if known is not None and not known.is_same(cluster):
        raise SettingsError(
            f"{folder} contains results of cluster {known}, not of {cluster}. Use another folder"
        )


def read_cluster(folder: Path) -> Cluster | None:
    """Return the cluster of the results; None before the first run. Raises SettingsError if the
    file cannot be read."""
    try:
        return decode_json((folder / CLUSTER_FILE).read_bytes(), Cluster)
    except FileNotFoundError:
        return None
    except (OSError, CorruptionError) as error:
        raise SettingsError(f"{folder / CLUSTER_FILE}: cannot be read: {error}") from error


def write_racks(folder: Path, racks: Mapping[BookieId, str]) -> None:
    """Store the racks, for a report that is written again later."""
    replace_file(folder / RACKS_FILE, json.dumps(dict(sorted(racks.items())), indent=2) + "\n")


def read_racks(folder: Path) -> dict[BookieId, str]:
    """Return the stored racks; none if they cannot be read."""
    try:
        return decode_json((folder / RACKS_FILE).read_bytes(), dict[BookieId, str])
    except (OSError, CorruptionError):
        return {}
