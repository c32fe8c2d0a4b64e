"""Results of a run: written, read, and counted."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from auditor.fsck.options import FsckOptions, Level
from auditor.fsck.results.folder import CLUSTER_FILE, Cluster, check_cluster, keep_cluster
from auditor.fsck.results.rows import VERSION_NOTE, replace_table
from auditor.fsck.results.run_folder import Results, RunFolder
from auditor.fsck.results.summary import Summary, read_summary
from auditor.fsck.verdicts import Finding, Grade, LedgerVerdict
from daemon.fsck.advice import advice_for, headline
from ledgers.errors import CorruptionError, SettingsError
from ledgers.model import BookieId
from tests.fsck.results import DAY_MS, LATER_RUN, RUN, counted, damaged, leave_results, seen, whole

A, B, C = (BookieId(f"{name}:3181") for name in "abc")

LOST = damaged(1, Grade.LOST, seen(Finding.MISSING, A), seen(Finding.BAD_DIGEST, B))
AT_RISK = damaged(2, Grade.AT_RISK, seen(Finding.MISSING, A), seen(Finding.MISSING, A), length=5)
LARGE_AT_RISK = damaged(9, Grade.AT_RISK, seen(Finding.MISSING, C), age_ms=400 * DAY_MS)
UNKNOWN = damaged(4, Grade.UNKNOWN, seen(Finding.NOT_ANSWERED, C), age_ms=10 * DAY_MS)
LEGAL = damaged(5, Grade.DEGRADED, seen(Finding.ACK_QUORUM_ONLY, A))
SUSPECT = damaged(6, Grade.WHOLE, seen(Finding.SUSPECT, B), age_ms=1_000)
IDLE = damaged(7, Grade.WHOLE, seen(Finding.IDLE_OPEN))
ALL = [whole(0), LOST, AT_RISK, LARGE_AT_RISK, UNKNOWN, LEGAL, SUSPECT, IDLE]


# --- The summary ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verdicts", "exit_code"),
    [
        pytest.param([], 0, id="an empty cluster"),
        pytest.param([whole(0), LEGAL, IDLE], 0, id="whole, or excused"),
        pytest.param([whole(0), LOST], 1, id="lost"),
        pytest.param([AT_RISK], 1, id="at risk"),
        pytest.param([damaged(3, Grade.DEGRADED, seen(Finding.MISSING, A))], 1, id="degraded"),
        pytest.param([SUSPECT], 1, id="suspect"),
        pytest.param([whole(0), UNKNOWN], 3, id="could not tell"),
        pytest.param([UNKNOWN, LOST], 1, id="wrong wins over unknown"),
    ],
)
def test_the_exit_code_depends_on_the_worst_verdict(
    verdicts: list[LedgerVerdict], exit_code: int
) -> None:
    summary = Summary(
        run=RUN, level=Level.FULL, started_ms=0, finished_ms=1, counts=counted(verdicts)
    )

    assert summary.exit_code == exit_code


def test_wrong_ledgers_that_were_left_still_count() -> None:
    summary = Summary(
        run=RUN, level=Level.FULL, started_ms=0, finished_ms=1, counts=counted([whole(0)]),
        left=7, left_wrong=2,
    )  # fmt: skip

    assert (summary.wrong, summary.exit_code) == (2, 1)
    assert headline(summary).startswith("Nothing is known to be lost, but some copies are missing")
    assert any("the last check found wrong: 2" in each.title for each in advice_for(summary))


def test_a_hidden_directory_leaves_a_run_unknown() -> None:
    summary = Summary(
        run=RUN, level=Level.FULL, started_ms=0, finished_ms=1, counts=counted([whole(0)]),
        hidden=("/ledgers/00/0099",),
    )  # fmt: skip

    assert (summary.exit_code, summary.is_complete) == (3, False)
    assert "could not be checked completely" in headline(summary)
    assert [each.title for each in advice_for(summary)] == [
        "Directories of ledgers that ACLs hide, at least: 1"
    ]


def test_a_written_summary_is_read_unchanged(tmp_path: Path) -> None:
    written = leave_results(tmp_path, ALL, left=2, left_wrong=1, gone=1, hidden=("/a",)).summary

    assert read_summary(tmp_path) == written
    assert written.counts.verdicts == {
        "lost": 1, "at_risk": 2, "degraded": 1, "unknown": 1, "whole": 3,
    }  # fmt: skip
    assert written.counts.findings["missing"] == 3
    assert (written.counts.ledgers, written.counts.wrong, written.is_complete) == (8, 4, False)


def test_counts_of_parts_add_up() -> None:
    assert counted(ALL[:3]) + counted(ALL[3:]) == counted(ALL)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"run": "r", "level": "closer"}'])
def test_a_damaged_summary_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "summary.json").write_text(content)

    with pytest.raises(CorruptionError):
        read_summary(tmp_path)


def test_results_of_another_version_are_refused(tmp_path: Path) -> None:
    written = leave_results(tmp_path, [LOST])
    (tmp_path / "summary.json").write_text(
        json.dumps({**written.summary.to_record(), "version": 2})
    )
    for path in written.path.iterdir():
        replace_table(path, pq.read_table(path).replace_schema_metadata(), note={VERSION_NOTE: "2"})

    with pytest.raises(CorruptionError, match="a record of version 2, and this release reads 1"):
        Results.open(tmp_path)
    with pytest.raises(CorruptionError, match="rows of version 2, and this release reads 1"):
        list(Results.open(tmp_path, RUN).wrong())


def test_earlier_runs_are_found_by_name(tmp_path: Path) -> None:
    leave_results(tmp_path, [LOST])
    leave_results(tmp_path, ALL, run=LATER_RUN)

    assert Results.named(str(tmp_path)).summary.run == LATER_RUN
    assert Results.named(f"{tmp_path}@{RUN}").summary.counts.ledgers == 1


def test_a_folder_without_results_is_reported(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="there are no results of a finished fsck run"):
        Results.named(str(tmp_path / "missing"))
    with pytest.raises(SettingsError, match="no results of the run R"):
        Results.named(f"{tmp_path}@R")


def test_an_unknown_run_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    leave_results(tmp_path, [LOST])
    begun = RunFolder(tmp_path / "begun", LATER_RUN)
    begun.begin([], FsckOptions(metadata_service_uri="zk://a/ledgers"), started_ms=0)

    with pytest.raises(SettingsError, match=f"no results of the run R; known runs: {RUN}"):
        Results.named(f"{tmp_path}@R")
    with pytest.raises(SettingsError, match=f"the run {LATER_RUN} is unfinished"):
        Results.named(str(tmp_path / "begun"))


# --- Results of one cluster are not used for another ----------------------------------------------


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
