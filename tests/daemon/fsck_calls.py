"""Call commands of ``bookmender fsck`` without Spark: the run and the cluster are fakes."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from auditor.fsck.damage_marker import DamagedLedger, MarkCounts, MarkPreview, Show
from auditor.fsck.options import FeedChanges, FsckProgress, OnProgress
from auditor.fsck.results.folder import Cluster
from auditor.fsck.results.summary import Summary
from auditor.fsck.verdicts import Finding, Grade, LedgerVerdict
from daemon.cli import fsck as fsck_command
from daemon.cli.fsck import fsck
from daemon.cli.main import main
from daemon.fsck.changes import Fetched, WhyWhole
from daemon.fsck.runner import ClusterFacts, MarkResult, RunRequest
from daemon.settings import Settings
from ledgers.errors import BookmenderError
from ledgers.model import BookieId
from tests.fsck.results import damaged, leave_results, seen

URI = "zk+hierarchical://zk:2181/ledgers"
CLUSTER = Cluster(instance_id="id-1", metadata_service_uri=URI)
A = BookieId("a:3181")
LOST = damaged(1, Grade.LOST, seen(Finding.MISSING, A))
UNKNOWN = damaged(2, Grade.UNKNOWN, seen(Finding.NOT_ANSWERED, A))
Verdicts = Sequence[LedgerVerdict]


@dataclass(slots=True)
class FakeRuns:
    """A fake of Spark and the cluster."""

    verdicts: Verdicts = ()
    raises: BaseException | None = None
    wanted: RunRequest | None = None
    told: list[Summary] = field(default_factory=list)
    fetched: Fetched | None = None
    """What the change feed told."""
    changes: FeedChanges | None = None
    """What the run was told to check."""
    acknowledges: WhyWhole | BookmenderError | None = None
    acknowledged: list[tuple[FeedChanges, str]] = field(default_factory=list)
    changed: Sequence[int] = ()
    """Ledgers whose metadata has changed since their verdict."""
    published: list[DamagedLedger] = field(default_factory=list)

    async def fetch_cluster_facts(self, settings: Settings) -> ClusterFacts:
        return ClusterFacts(cluster=CLUSTER, rule=None, racks={A: "/rack-1"})

    async def changes_for(self, settings: Settings, request: RunRequest) -> Fetched:
        assert self.fetched is not None
        return self.fetched

    async def acknowledge_run(
        self, settings: Settings, request: RunRequest, changes: FeedChanges, summary: Summary
    ) -> WhyWhole | None:
        self.acknowledged.append((changes, summary.run))
        if isinstance(self.acknowledges, BookmenderError):
            raise self.acknowledges
        return self.acknowledges

    def run(
        self,
        wanted: RunRequest,
        places: ClusterFacts,
        on_progress: OnProgress,
        changes: FeedChanges | None,
    ) -> Summary:
        self.wanted, self.changes = wanted, changes
        if self.raises is not None:
            raise self.raises
        on_progress(FsckProgress(phase="checking", ledgers_done=1, ledgers_expected=2))
        level = wanted.options.level
        return leave_results(wanted.output, self.verdicts, level=level).summary

    async def publish_summary(self, settings: Settings, summary: Summary) -> None:
        self.told.append(summary)

    async def mark_damaged(
        self,
        settings: Settings,
        folder: Path,
        run: str,
        faults: Sequence[DamagedLedger],
        show: Show,
    ) -> MarkResult:
        self.published += faults
        published = MarkCounts(new=len(faults), known=2, changed=3, own=1)
        return MarkResult(counts=published, has_worker=False)

    async def preview_damaged(
        self, settings: Settings, folder: Path, faults: Sequence[DamagedLedger], show: Show
    ) -> MarkPreview:
        to_mark = tuple(fault for fault in faults if fault.ledger_id not in self.changed)
        return MarkPreview(ledgers=to_mark, changed=len(faults) - len(to_mark), own=1)


def fake_runs(monkeypatch: pytest.MonkeyPatch) -> FakeRuns:
    """Replace runs by a fake, and remove all settings of the environment."""
    for name in os.environ:
        if name.startswith("BOOKMENDER_"):
            monkeypatch.delenv(name)
    fake = FakeRuns()
    for name in (
        "fetch_cluster_facts",
        "changes_for",
        "acknowledge_run",
        "run",
        "publish_summary",
        "mark_damaged",
        "preview_damaged",
    ):
        monkeypatch.setattr(fsck_command, name, getattr(fake, name))
    monkeypatch.setattr(fsck_command, "check_spark", lambda wanted: None)
    return fake


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(fsck, list(map(str, arguments)))


def call_run(folder: Path, *arguments: str) -> Result:
    return call("run", "--metadata-service-uri", URI, "--output", folder, *arguments)


def failing(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    """Run the command as from a shell, and return its exit code."""
    monkeypatch.setattr("sys.argv", ["bookmender", "fsck", *map(str, arguments)])
    with pytest.raises(SystemExit) as exited:
        main()
    assert isinstance(exited.value.code, int)
    return exited.value.code
