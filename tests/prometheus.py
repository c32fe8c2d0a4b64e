"""A real Prometheus that scrapes nodes, with the alert rules of deploy/."""

import asyncio
import json
import shutil
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import yaml

from daemon.local.ports import LOOPBACK, free_ports
from daemon.local.processes import Child, stop_all
from ledgers.errors import SettingsError
from tests.cluster.java_http import ask
from tests.cluster.steps import wait_for

PROGRAMS = ("prometheus", "promtool")
DEPLOY = Path(__file__).parent.parent / "deploy"
RULES = DEPLOY / "prometheus" / "bookmender.rules.yaml"
JOB = "bookmender-test"
STOP_TIMEOUT_S = 10.0


def find_prometheus() -> tuple[str, str]:
    """Return the paths of Prometheus and promtool. Raise SettingsError with advice if one is
    missing."""
    prometheus, promtool = map(shutil.which, PROGRAMS)
    if prometheus is None or promtool is None:
        raise SettingsError(
            "Prometheus and promtool are needed: install them (Debian: apt install prometheus)"
        )
    return prometheus, promtool


@dataclass(frozen=True, slots=True, kw_only=True)
class Prometheus:
    base: str
    began_s: float

    async def ask(self, name: str, **parameters: str | float) -> Any:
        """Return the data of an answer of the API."""
        status, text = await ask(self.base, f"/api/v1/{name}?{urlencode(parameters)}")
        answer = json.loads(text)
        assert (status, answer["status"]) == (200, "success"), (parameters, text)
        assert "warnings" not in answer, (parameters, text)
        return answer["data"]

    async def series(self, query: str) -> list[tuple[dict[str, str], list[float]]]:
        """Return the labels and the values since the start, of all series."""
        times: dict[str, str | float] = {"start": self.began_s, "end": time.time(), "step": "1s"}
        found = await self.ask("query_range", query=query, **times)
        return [
            (series["metric"], [float(value) for _, value in series["values"]])
            for series in found["result"]
        ]

    async def values(self, query: str) -> list[float]:
        """Return all values since the start, of all series."""
        return [value for _, values in await self.series(query) for value in values]

    async def firing(self) -> set[str]:
        """Return the names of the alerts that fire."""
        alerts = (await self.ask("alerts"))["alerts"]
        return {each["labels"]["alertname"] for each in alerts if each["state"] == "firing"}


@asynccontextmanager
async def running_prometheus(
    folder: Path, targets: Sequence[str], *, rules: Path = RULES
) -> AsyncIterator[Prometheus]:
    """Run a Prometheus that scrapes the targets each second, once it has scraped all of them."""
    program, _ = find_prometheus()
    (port,) = free_ports(1)
    configuration = folder / "prometheus.yml"
    configuration.write_text(
        yaml.safe_dump(
            {
                "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
                "rule_files": [str(rules)],
                "scrape_configs": [
                    {"job_name": JOB, "static_configs": [{"targets": list(targets)}]}
                ],
            }
        )
    )
    command = [
        program,
        f"--config.file={configuration}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={LOOPBACK}:{port}",
    ]
    child = Child("prometheus", command, log=folder / "prometheus.log")
    prometheus = Prometheus(base=f"http://{LOOPBACK}:{port}", began_s=time.time())

    async def has_scraped() -> bool:
        assert child.is_running, child.log_tail()
        try:
            if (await ask(prometheus.base, "/-/ready"))[0] != 200:
                return False
        except OSError:
            return False
        return len(await prometheus.series(f'up{{job="{JOB}"}} == 1')) == len(targets)

    try:
        await wait_for(has_scraped, "scrape of each node")
        yield prometheus
    finally:
        await asyncio.to_thread(stop_all, [child], timeout_s=STOP_TIMEOUT_S)
