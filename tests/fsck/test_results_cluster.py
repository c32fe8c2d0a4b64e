"""Results of one cluster are never used for another."""

from pathlib import Path

import pytest

from auditor.fsck.results.folder import CLUSTER_FILE, Cluster, check_cluster, keep_cluster
from ledgers.errors import SettingsError

URI, OTHER_URI = "zk://zk1:2181/ledgers", "zk://zk2:2181/ledgers"


def cluster(instance_id: str, uri: str = URI) -> Cluster:
    return Cluster(instance_id=instance_id, metadata_service_uri=uri)


@pytest.mark.parametrize(
    ("other", "is_same"),
    [
        (cluster("a"), True),
        (cluster("a", OTHER_URI), True),
        (cluster("b"), False),
        (cluster(""), False),
    ],
    ids=["itself", "by another URI", "another one at its URI", "one without an id"],
)
def test_a_folder_belongs_to_its_first_cluster(
    tmp_path: Path, other: Cluster, is_same: bool
) -> None:
    keep_cluster(tmp_path, cluster("a"))

    if is_same:
        keep_cluster(tmp_path, other)
        check_cluster(tmp_path, cluster("a"))
    else:
        with pytest.raises(SettingsError, match=r"cluster a .*, not of "):
            keep_cluster(tmp_path, other)
        check_cluster(tmp_path, cluster("a"))


def test_clusters_without_ids_are_distinguished_by_uri(tmp_path: Path) -> None:
    keep_cluster(tmp_path, cluster(""))

    check_cluster(tmp_path, cluster(""))
    with pytest.raises(SettingsError, match=r"zk1.*zk2"):
        check_cluster(tmp_path, cluster("", OTHER_URI))


@pytest.mark.parametrize(
    "uri", [f"'{URI}'", "zk+hierarchical://zk1:2181/ledgers", "metadata-store:zk:zk1:2181/ledgers"]
)
def test_a_uri_may_be_written_in_another_way(tmp_path: Path, uri: str) -> None:
    keep_cluster(tmp_path, cluster(""))

    check_cluster(tmp_path, cluster("", uri))


def test_a_folder_with_a_damaged_cluster_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / CLUSTER_FILE).write_text("role")

    with pytest.raises(SettingsError, match="cannot be read"):
        keep_cluster(tmp_path, cluster("a"))
