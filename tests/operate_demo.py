"""Operate a secured cluster through the loss of a bookie: ``make demo-operate``, about two minutes.

ZooKeeper and bookies have TLS, SASL and ACLs. A bookie is killed, and nodes with ``[security]``
settings repair its ledgers. Meanwhile a real Prometheus evaluates the alert rules of deploy/, and
Chromium shows the page of a node. The demo compares page, API, commands, metrics and history.
Finally it decommissions the bookie, and reads every copy of every entry.

Exit code 0: everything was as expected; 1: something was not; 2: a program is missing.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from daemon.cli.demo import prove, start_nodes
from daemon.local.cluster import LocalCluster
from daemon.local.processes import Child, stop_all
from daemon.local.security import find_openssl
from daemon.local.writing import Written
from ledgers.model import BookieId
from tests.chromium import Tab, chromium
from tests.cluster.java_http import ask
from tests.cluster.steps import Bench, bench, errors, events, wait_for
from tests.demo import Say, SurpriseError, logs_kept, run_demo, teller
from tests.fsck.browser import find_chromium
from tests.page import IS_LIVE, differences, lists_bookies, shown, take_pictures
from tests.prometheus import RULES, Prometheus, find_prometheus, running_prometheus

BOOKIES, NODES, LEDGERS, LEFT_OPEN = 5, 3, 200, 4
SESSION_TIMEOUT_S = 4.0
SETTINGS = {
    "BOOKMENDER_NODE_NICE": "0",
    "BOOKMENDER_ZOOKEEPER_SESSION_TIMEOUT_S": "4",
    "BOOKMENDER_REPLICATION_ENTRIES_PER_S": "25",  # slow enough to be watched
    "BOOKMENDER_REPLICATION_OPEN_LEDGER_GRACE_S": "3",
    "BOOKMENDER_REPLICATION_FREE_DISK_SHARE_MIN": "0",
}
"""Of the nodes, beside the file of the cluster."""
ALERT, ALERT_FOR = "BookmenderBookiesLost", "3s"
SAMPLES_MIN = 4
"""Different lengths of the queue that the page must have shown between its longest and 0."""
POLL_S, LINE_S = 0.1, 3.0
REPAIR_TIMEOUT_S = 180.0
COMMAND_TIMEOUT_S = 60.0
FINAL_TIMEOUT_S = 60.0
"""For a last scrape, an alert that ends, the record of the history."""
STOP_TIMEOUT_S = 6.0


def main() -> None:
    parser = argparse.ArgumentParser(prog="make demo-operate ARGS=")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("build/demo-operate"),
        help="folder for the pictures, and for the logs after a failure",
    )
    output = parser.parse_args().output.resolve()
    run_demo("demo-operate", partial(_run, output))


def _run(output: Path) -> None:
    for find in (find_prometheus, find_chromium, find_openssl):
        find()
    output.mkdir(parents=True, exist_ok=True)
    say = teller()
    with TemporaryDirectory(prefix="demo-operate-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        with logs_kept(folder, output):
            print(f"starting ZooKeeper and {BOOKIES} bookies, with TLS, SASL and ACLs", flush=True)
            with LocalCluster.start(
                folder / "cluster",
                bookies=BOOKIES,
                session_timeout_s=SESSION_TIMEOUT_S,
                is_secured=True,
            ) as cluster:
                demo = Demo(cluster=cluster, folder=folder, output=output, say=say)
                asyncio.run(demo.run())


@dataclass(slots=True, kw_only=True)
class Demo:
    cluster: LocalCluster
    folder: Path
    output: Path
    say: Say

    @property
    def config(self) -> Path:
        """The settings of nodes and commands, with the section [security]."""
        assert self.cluster.settings_file is not None
        return self.cluster.settings_file

    async def run(self) -> None:
        security = tomllib.loads(self.config.read_text())["security"]
        self.say(f"[security] sets {', '.join(security)}")
        rules = self._write_rules()
        uri = self.cluster.metadata_service_uri
        async with bench(uri, security=self.cluster.security) as on:
            self.say(f"writing {LEDGERS} ledgers, {LEFT_OPEN} of them left open")
            await on.workload.write(LEDGERS, open_count=LEFT_OPEN)
            written = on.workload.written
            nodes: list[Child] = []
            try:
                bases = await self._start(nodes)
                targets = [base.removeprefix("http://") for base in bases]
                async with (
                    running_prometheus(self.folder, targets, rules=rules) as prometheus,
                    chromium() as tab,
                ):
                    self.say(f"Prometheus at {prometheus.base} scrapes all nodes")
                    await self._operate(on, written, bases[0], prometheus, tab)
                if found := [each for node in nodes for each in errors(node)]:
                    raise SurpriseError(f"the nodes logged errors: {found}")
            finally:
                await asyncio.to_thread(stop_all, nodes, timeout_s=STOP_TIMEOUT_S)
            await self._prove(on, written)
        self.say(f"done: everything was as expected; pictures of the page: {self.output}")

    # --- Before the failure ----------------------------------------------------------------------

    def _write_rules(self) -> Path:
        """Write a copy of the rules of deploy/ in which one alert fires sooner."""
        rules = yaml.safe_load(RULES.read_text())
        found = [rule for group in rules["groups"] for rule in group["rules"]]
        (rule,) = [rule for rule in found if rule["alert"] == ALERT]
        before, rule["for"] = rule["for"], ALERT_FOR
        path = self.folder / "bookmender.rules.yaml"
        path.write_text(yaml.safe_dump(rules))
        _, promtool = find_prometheus()
        for each in (RULES, path):
            command = [promtool, "check", "rules", str(each)]
            checked = subprocess.run(command, capture_output=True, text=True, check=False)
            if checked.returncode:
                raise SurpriseError(f"promtool refuses {each}: {checked.stderr}")
        self.say(
            f"{len(found)} alert rules as in deploy/, but {ALERT} has `for: {ALERT_FOR}` instead "
            f"of {before}"
        )
        return path

    async def _start(self, nodes: list[Child]) -> list[str]:
        """Start the nodes, and return the addresses of their HTTP servers once they are ready."""
        self.say("a command without [security] is refused")
        await self._bookmender("status", exit_code=3, with_config=False)
        self.say(f"starting {NODES} nodes")
        nodes += start_nodes(self.folder, NODES, SETTINGS, config=self.config)
        bases = []
        for node in nodes:
            listening = partial(events, node, "http.listening")
            (event,) = await wait_for(listening, f"HTTP server of {node.name}")
            bases.append(f"http://127.0.0.1:{event['port']}")

        async def are_ready() -> bool:
            answers = [await ask(base, "/readyz") for base in bases]
            return {status for status, _ in answers} == {200}

        await wait_for(are_ready, "readiness of all nodes")

        async def is_healthy() -> bool:
            status = await _status(bases[0])
            return status["health"] == "OK" and len(status["nodes"]) == 2 * NODES

        await wait_for(is_healthy, "health OK with all nodes")
        await self._bookmender("status", exit_code=0)
        return bases

    # --- The failure, the repair, and the time after ---------------------------------------------

    async def _operate(
        self, on: Bench, written: Sequence[Written], base: str, prometheus: Prometheus, tab: Tab
    ) -> None:
        await tab.open(f"{base}/")
        await tab.wait_for(IS_LIVE)
        await tab.value("window.isSameDocument = true")
        self.say(f"Chromium shows {base}/")
        victim = self.cluster.bookies[1]
        named = await on.names(written, victim)
        self.say(f"killing bookie {victim} (SIGKILL), which {len(named)} ledgers name")
        self.cluster.kill(victim)
        codes = await self._watch(on, written, victim, base, prometheus, tab)
        self.say("no ledger names the bookie, and the queue is empty")

        await self._expect_alert(prometheus, set())
        await self._agree(base, tab, victim)
        for code in sorted(codes):
            if not (await self._bookmender("status", "--explain", code, exit_code=0)).startswith(
                code
            ):
                raise SurpriseError(f"status --explain does not explain {code}")
        await self._check_records(written, named, victim, prometheus)
        await take_pictures(tab, self.output, "2-repaired")

        await self._bookmender("bookie", "decommission", victim, exit_code=0)
        await tab.wait_for("document.getElementById('word').textContent === 'OK'")
        await self._bookmender("status", exit_code=0)
        await take_pictures(tab, self.output, "3-decommissioned")
        fired = await prometheus.series('ALERTS{alertstate="firing"}')
        if names := {labels["alertname"] for labels, _ in fired} - {ALERT}:
            raise SurpriseError(f"other alerts fired, too: {names}")
        if not await tab.value("window.isSameDocument") or tab.errors:
            raise SurpriseError(f"the page was reloaded or has errors: {tab.errors}")
        self.say(f"no alert but {ALERT} fired; the page was never reloaded and has no errors")

    async def _watch(
        self,
        on: Bench,
        written: Sequence[Written],
        victim: BookieId,
        base: str,
        prometheus: Prometheus,
        tab: Tab,
    ) -> set[str]:
        """Compare page and API until the repair is over. Return the conditions that held."""
        queued, codes, taken_ms, said_s, has_pictures = [0], set(), 0, 0.0, False
        deadline_s = time.monotonic() + REPAIR_TIMEOUT_S
        while True:
            status, page = await _status(base), await shown(tab)
            if taken_ms != page["taken_ms"] == status["taken_ms"]:
                taken_ms = page["taken_ms"]
                if found := differences(page, status):
                    raise SurpriseError("; ".join(found))
                queued.append(status["queue"]["total"])
                codes.update(page["codes"])
                if (now_s := time.monotonic()) - said_s >= LINE_S:
                    said_s = now_s
                    self.say(
                        f"page and API: {page['health']:<4} {', '.join(page['codes']) or '-'}, "
                        f"{queued[-1]} queued, {status['queue']['locked']} under repair; "
                        f"firing: {', '.join(await prometheus.firing()) or 'nothing'}"
                    )
                if not has_pictures and 0 < queued[-1] < max(queued) / 2:
                    has_pictures = True
                    await take_pictures(tab, self.output, "1-during")
                if max(queued) and not queued[-1] and not await on.names(written, victim):
                    break
            if time.monotonic() > deadline_s:
                reasons = [each["reason"] for each in status["waiting"]["ledgers"]]
                raise SurpriseError(
                    f"not all ledgers were repaired after {REPAIR_TIMEOUT_S:g} s: "
                    f"{status['queue']['total']} queued, reasons: {reasons}"
                )
            await asyncio.sleep(POLL_S)
        lengths = sorted({each for each in queued if each}, reverse=True)
        if len(lengths) < SAMPLES_MIN or not has_pictures:
            raise SurpriseError(f"the page did not show how the queue shrinks: {queued}")
        self.say(
            f"page and API agreed at all {len(queued) - 1} moments; the queue: "
            f"{', '.join(map(str, lengths))}, 0"
        )
        return codes

    async def _agree(self, base: str, tab: Tab, victim: BookieId) -> None:
        """Check that command, API and page tell the same of the cluster, which is at rest."""

        async def is_ok() -> bool:  # a lost bookie that no ledger names is only worth knowing
            return bool((await _status(base))["health"] == "OK")

        await wait_for(is_ok, "health OK")
        told = json.loads(await self._bookmender("status", "-o", "json", exit_code=0))

        async def is_same() -> bool:
            status, page = await _status(base), await shown(tab)
            facts = ("health", "conditions", "queue", "bookies", "leader_node")
            is_told = all(told[name] == status[name] for name in facts)
            is_shown = not differences(page, status) and lists_bookies(page, status)
            return page["taken_ms"] == status["taken_ms"] and is_told and is_shown

        if [victim] != told["bookies"]["lost"] or told["queue"]["total"]:
            raise SurpriseError(f"status tells otherwise: {told}")
        await wait_for(is_same, "moment at which page, API and command agree", within_s=30)
        self.say("`bookmender status`, the API and the page agree")

    async def _check_records(
        self,
        written: Sequence[Written],
        named: Sequence[int],
        victim: BookieId,
        prometheus: Prometheus,
    ) -> None:
        """Check that history and metrics tell of each repair."""
        is_open = {each.ledger_id for each in written if each.shape.is_left_open}
        wanted = (len(named), len(named), sorted(is_open.intersection(named)))
        found: Any = None

        async def is_recorded() -> bool:
            nonlocal found
            record = json.loads(await self._run_command("history", "-o", "json", exit_code=0))
            told = record["events"]
            marked = [e for e in told if e["kind"] == "ledgers-marked" and victim in e["bookies"]]
            found = (
                sum(each["ledger_count"] for each in marked),
                sum(e["ledger_count"] for e in told if e["kind"] == "ledgers-repaired"),
                sorted(e["ledger_id"] for e in told if e["kind"] == "ledger-recovered"),
            )
            return bool(found == wanted)

        try:
            await wait_for(is_recorded, "record", within_s=FINAL_TIMEOUT_S)
        except AssertionError as error:
            raise SurpriseError(f"history tells {found}, not {wanted}") from error
        for line in (await self._bookmender("history", exit_code=0)).splitlines():
            print(f"          {line}")
        done = 'sum(bookmender_repairs_total{outcome="done"})'

        async def is_scraped() -> bool:
            return (await prometheus.values(done))[-1] == len(named)

        await wait_for(is_scraped, f"value {len(named)} of {done}", within_s=FINAL_TIMEOUT_S)
        self.say(f"history and Prometheus count {len(named)} repaired ledgers")

    async def _expect_alert(self, prometheus: Prometheus, wanted: set[str]) -> None:
        async def is_firing() -> bool:
            return await prometheus.firing() == wanted

        await wait_for(is_firing, f"state with these alerts: {wanted}", within_s=FINAL_TIMEOUT_S)
        self.say(f"alerts that fire: {', '.join(wanted) or 'none'}")

    async def _prove(self, on: Bench, written: Sequence[Written]) -> None:
        """Read every copy, without the help of any node."""
        self.say("reading every copy of every entry")
        proofs = await prove(written, on.workload)
        bad = [proof for proof in proofs if proof.problems()]
        if bad:
            raise SurpriseError(f"{len(bad)} ledgers are not whole: {bad[:3]}")
        entries = sum(each.written.acknowledged for each in proofs)
        copies = sum(each.copies_good for each in proofs)
        self.say(f"{len(proofs)} ledgers are whole: {entries} entries, {copies} good copies")

    # --- Helpers ----------------------------------------------------------------------------------

    async def _bookmender(self, *arguments: str, exit_code: int, with_config: bool = True) -> str:
        """Run a command visibly. Return what it prints."""
        self.say(f"$ bookmender {' '.join(arguments)}")
        return await self._run_command(*arguments, exit_code=exit_code, with_config=with_config)

    async def _run_command(self, *arguments: str, exit_code: int, with_config: bool = True) -> str:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("BOOKMENDER_")}
        if with_config:
            arguments = (*arguments, "--config", str(self.config))
        else:
            environment["BOOKMENDER_METADATA_SERVICE_URI"] = self.cluster.metadata_service_uri
            environment["BOOKMENDER_ZOOKEEPER_CONNECT_TIMEOUT_S"] = "2"
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "daemon", *arguments),
            env=environment,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(COMMAND_TIMEOUT_S):
                out, err = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
        if process.returncode != exit_code:
            raise SurpriseError(
                f"bookmender {' '.join(arguments)} ended with {process.returncode}, not "
                f"{exit_code}: {out.decode()}{err.decode()}"
            )
        return out.decode()


async def _status(base: str) -> Any:
    code, text = await ask(base, "/api/v1/status")
    if code != 200:
        raise SurpriseError(f"{base}/api/v1/status: {code} {text}")
    return json.loads(text)


if __name__ == "__main__":
    main()
