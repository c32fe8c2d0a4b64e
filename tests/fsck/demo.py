"""Show fsck from end to end, and check each step: ``make fsck-demo``, about three minutes.

The demo starts a local cluster, writes ledgers with Java's client, and causes damage of each kind.
It runs fsck on a standalone Spark cluster, opens the report in a browser, and marks the findings. A
daemon then repairs what it can, and further runs prove it.
"""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from auditor.fsck.options import Level
from auditor.fsck.results.run_folder import Results
from auditor.fsck.verdicts import Finding, Grade
from daemon.local.cluster import LocalCluster
from daemon.operations.waiting import all_marked
from ledgers.errors import BookmenderError
from tests.cluster.steps import Bench, bench, nodes, wait_for
from tests.demo import SurpriseError
from tests.fsck.browser import counts_shown, find_chromium
from tests.fsck.kinds import Told
from tests.fsck.running import told
from tests.fsck.scene import BOOKIES, Scene, make_scene
from tests.java.tool import JavaTool
from tests.spark_cluster import HOST, SMALL, standalone_spark

SESSION_TIMEOUT_S = 20.0
COMMAND_TIMEOUT_S = 300.0
REPAIR_TIMEOUT_S = 120.0


def main() -> None:
    try:
        find_chromium()
        with ExitStack() as stack:
            Demo.set_up(stack).run()
    except (BookmenderError, SurpriseError) as error:
        sys.exit(f"fsck-demo: {error}")


@dataclass(slots=True, kw_only=True)
class Demo:
    """``results``: the folder of all runs, which stays after the demonstration."""

    cluster: LocalCluster
    scene: Scene
    spark: str
    folder: Path
    _began_s: float = field(default_factory=time.monotonic)

    @classmethod
    def set_up(cls, stack: ExitStack) -> "Demo":
        began_s = time.monotonic()
        folder = Path(mkdtemp(prefix="fsck-demo-"))
        print(f"all that it leaves is in {folder}")
        print(f"starting ZooKeeper and {BOOKIES} bookies")
        cluster = stack.enter_context(
            LocalCluster.start(
                folder / "cluster", bookies=BOOKIES, session_timeout_s=SESSION_TIMEOUT_S
            )
        )
        print(
            "Java's client writes ledgers; then damage of each kind, to the files of stopped "
            "bookies"
        )
        java = stack.enter_context(JavaTool())
        scene = make_scene(cluster, java)
        for kind in scene.damaged.values():
            print(f"    {kind.name}")
        print("starting a Spark cluster on loopback: a master and two workers")
        spark = stack.enter_context(standalone_spark(folder / "spark")).master
        return cls(cluster=cluster, scene=scene, spark=spark, folder=folder, _began_s=began_s)

    @property
    def results(self) -> Path:
        return self.folder / "results"

    def run(self) -> None:
        expected = self.scene.expected(Level.FULL)
        self._check(Level.FULL, 1, expected)
        self._show_report()
        self._say("marking the ledgers that can be repaired")
        self._bookmender("fsck", "mark", str(self.results), "--mark", exit_code=0)
        asyncio.run(self._repair())
        repaired = {i: self._repaired(i, each) for i, each in expected.items()}
        self._check(Level.FULL, 1, repaired)
        unreadable = self._with(repaired, Finding.UNREADABLE_METADATA)
        self._say(
            "deleting the ledgers that cannot be repaired, except those with unreadable metadata"
        )
        hopeless = self._with(repaired, Finding.SUSPECT) | {
            i for i, each in repaired.items() if each.grade is Grade.LOST
        }
        self._delete(hopeless)
        left = {i: each for i, each in repaired.items() if i not in hopeless}
        self._check(Level.FULL, 3, left)
        self._say("deleting those with unreadable metadata")
        self._delete(unreadable)
        self._check(Level.FULL, 0, {i: each for i, each in left.items() if i not in unreadable})
        self._say("an unknown level")
        self._bookmender("fsck", "run", "--level", "deep", "--output", "x", exit_code=2)
        self._say(f"done: every verdict was as expected; results in {self.results}")

    # --- Steps -----------------------------------------------------------------------------------

    def _check(self, level: Level, exit_code: int, expected: Mapping[int, Told]) -> None:
        """Run fsck on Spark, and check that its verdicts are as expected."""
        self._say(f"checking {len(expected)} ledgers, level {level.value}, on {self.spark}")
        settings = [f"--spark-conf={key}={value}" for key, value in SMALL.items()]
        self._bookmender(
            *("fsck", "run", "--level", level.value, "--output", str(self.results)),
            *("--master", self.spark, *settings),
            exit_code=exit_code,
        )
        found = {v.ledger_id: told(v) for v in Results.open(self.results).verdicts()}
        wrong = {i for i in {*found, *expected} if found.get(i) != expected.get(i)}
        if wrong:
            lines = [f"{self._name(i)}: {found.get(i)}, not {expected.get(i)}" for i in wrong]
            raise SurpriseError("\n".join(["verdicts that are not as expected:", *lines]))
        grades = Counter(each.grade.value for each in expected.values())
        counts = self._summary()
        if counts["verdicts"] != {grade.value: grades[grade.value] for grade in Grade}:
            raise SurpriseError(f"summary.json counts otherwise: {counts}")

    def _show_report(self) -> None:
        picture = self.folder / "report.png"
        self._say("opening the report in Chromium")
        shown = counts_shown(self.results / "report.html", screenshot=picture)
        counts = self._summary()
        wanted = {f"verdict-{name}": count for name, count in counts["verdicts"].items()}
        wanted |= {f"finding-{name}": count for name, count in counts["findings"].items() if count}
        wanted["ledgers"] = counts["ledgers"]
        if shown != wanted:
            raise SurpriseError(f"the page shows {shown}, summary.json says {wanted}")
        self._say(f"its {len(shown)} counts are those of summary.json; a picture: {picture}")

    async def _repair(self) -> None:
        """Run a daemon until only ledgers that cannot be repaired are marked."""
        uri = self.cluster.metadata_service_uri
        lost = {
            i for i, each in self.scene.expected(Level.FULL).items() if each.grade is Grade.LOST
        }
        async with bench(uri) as on, nodes(uri, self.folder) as start:
            self._say("a daemon repairs")
            start("daemon")

            async def is_repaired() -> bool:
                return await all_marked(on.seen) <= lost and not await self._is_lost_bookie_named(
                    on
                )

            await wait_for(is_repaired, "end of the repairs", within_s=REPAIR_TIMEOUT_S)

    async def _is_lost_bookie_named(self, on: Bench) -> bool:
        """Return True if a ledger still names a lost bookie.

        The daemon's auditor finds these itself.
        """
        gone = self._with(self.scene.expected(Level.METADATA), Finding.BOOKIE_GONE)
        for ledger_id in gone:
            metadata = (await on.seen.manager.read(ledger_id)).metadata
            if not metadata.bookies <= set(self.cluster.bookies):
                return True
        return False

    def _delete(self, ledger_ids: Collection[int]) -> None:
        async def delete() -> None:
            async with bench(self.cluster.metadata_service_uri) as on:
                for ledger_id in ledger_ids:
                    await on.seen.manager.delete(ledger_id, version=-1)

        asyncio.run(delete())

    # --- Helpers ----------------------------------------------------------------------------------

    def _bookmender(self, *arguments: str, exit_code: int) -> None:
        uri = () if exit_code == 2 else self._uri
        command = [sys.executable, "-m", "daemon", *arguments, *uri]
        print(f"$ bookmender {' '.join(arguments)}", flush=True)
        environment = {**os.environ, "SPARK_LOCAL_IP": HOST}
        done = subprocess.run(command, env=environment, timeout=COMMAND_TIMEOUT_S, check=False)
        self._say(f"exit code {done.returncode}")
        if done.returncode != exit_code:
            raise SurpriseError(f"it should have been {exit_code}")

    @property
    def _uri(self) -> tuple[str, ...]:
        return "--metadata-service-uri", self.cluster.metadata_service_uri

    def _repaired(self, ledger_id: int, before: Told) -> Told:
        """Return the verdict after the daemon's repairs."""
        kind = self.scene.damaged.get(ledger_id)
        if kind is None:
            return Told()
        return before if kind.repaired is None else kind.repaired

    def _name(self, ledger_id: int) -> str:
        kind = self.scene.damaged.get(ledger_id)
        return f"ledger {ledger_id} ({kind.name if kind else 'on bookies damaged as a whole'})"

    @staticmethod
    def _with(expected: Mapping[int, Told], finding: Finding) -> set[int]:
        return {i for i, each in expected.items() if finding in each.findings}

    def _summary(self) -> Any:
        return json.loads((self.results / "summary.json").read_text())

    def _say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._began_s:4.0f} s] {text}", flush=True)


if __name__ == "__main__":
    main()
