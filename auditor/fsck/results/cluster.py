"""Which cluster a folder of results is of: ``cluster.json``, by its first run; each later one
renews the URI.

Ids of ledgers mean something in one cluster alone: what was found of another's is neither compared
nor marked.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from auditor.fsck.results.replacing import replace_file
from ledgers.errors import CorruptionError, SettingsError
from ledgers.formats.layout import MetadataUri
from replication.cluster.own_state import parse_record, text

CLUSTER_FILE = "cluster.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """``instance_id``: empty for a cluster that has none, which its URI stands for then."""

    instance_id: str
    metadata_service_uri: str

    def is_same(self, other: "Cluster") -> bool:
        """Whether the URI is another says nothing where there are ids: servers move, and have
        several names."""
        if self.instance_id or other.instance_id:
            return self.instance_id == other.instance_id
        return _place(self.metadata_service_uri) == _place(other.metadata_service_uri)

    def __str__(self) -> str:
        return f"{self.instance_id or 'one without an id'} ({self.metadata_service_uri})"


def _place(uri: str) -> tuple[str, str]:
    """Return the servers and the ledgers root: the same place may be written with quotes, or with a
    layout."""
    try:
        parsed = MetadataUri.parse(uri)
    except SettingsError:  # of a file that someone edited
        return uri, ""
    return parsed.hosts, parsed.root


def keep_cluster(folder: Path, cluster: Cluster) -> None:
    """Before a run writes there. Raises SettingsError where the results are another cluster's."""
    check_cluster(folder, cluster)
    replace_file(folder / CLUSTER_FILE, json.dumps(asdict(cluster), indent=2) + "\n")


def check_cluster(folder: Path, cluster: Cluster) -> None:
    """Raises SettingsError where the results are another cluster's."""
    known = read_cluster(folder)
    if known is not None and not known.is_same(cluster):
        raise SettingsError(f"{folder}: has results of the cluster {known}, and this is {cluster}")


def check_same_cluster(before: Path, after: Path) -> None:
    """Raises SettingsError where results of two folders are of two clusters."""
    if (cluster := read_cluster(after)) is not None:
        check_cluster(before, cluster)


def read_cluster(folder: Path) -> Cluster | None:
    """None before the first run. Raises SettingsError where nobody can tell."""
    try:
        record = parse_record((folder / CLUSTER_FILE).read_bytes())
        return Cluster(
            instance_id=text(record, "instance_id"),
            metadata_service_uri=text(record, "metadata_service_uri"),
        )
    except FileNotFoundError:
        return None
    except (OSError, CorruptionError) as error:
        raise SettingsError(f"{folder / CLUSTER_FILE}: cannot be read: {error}") from error
