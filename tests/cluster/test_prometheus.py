"""A real Prometheus scrapes a node during a repair, and answers what the dashboard asks.

Skipped where Prometheus is not installed. The test leaves the cluster whole and the queue empty.
"""

import asyncio
import json
import shutil
from contextlib import suppress
from pathlib import Path

import pytest

from daemon.local.cluster import LocalCluster
from tests.cluster.bookies_in_trouble import kill_and_expire
from tests.cluster.steps import bench, shape, wait_for
from tests.cluster.test_http import serving_node
from tests.prometheus import DEPLOY, JOB, PROGRAMS, running_prometheus

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.long(group="http"),
    pytest.mark.timeout(360),
    pytest.mark.skipif(
        not all(map(shutil.which, PROGRAMS)),
        reason="Prometheus is not installed (Debian: apt install prometheus)",
    ),
]
VARIABLES = {"$job": JOB, "$instance": ".*", "$__rate_interval": "1m"}
MAY_BE_EMPTY = ("log_events_total", "deferrals_total", 'kind="found"', "fsck_finished")
"""Parts of queries that have data only after a problem, or a run of fsck."""


def dashboard_queries() -> list[str]:
    """Return the queries of the dashboard, with a value for each variable."""
    dashboard = json.loads((DEPLOY / "grafana" / "bookmender.json").read_text())
    queries = [
        target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())
    ]
    for variable, value in VARIABLES.items():
        queries = [query.replace(variable, value) for query in queries]
    assert not [query for query in queries if "$" in query]
    return queries


async def test_the_dashboard_shows_a_repair_and_the_rules_are_evaluated(
    module_cluster: LocalCluster, uri: str, tmp_path: Path
) -> None:
    victim = module_cluster.bookies[0]

    async with (
        bench(uri) as on,
        serving_node(uri, tmp_path) as (_, node),
        running_prometheus(tmp_path, [node.removeprefix("http://")]) as prometheus,
    ):
        written = await on.write(*(shape(number) for number in range(60)))
        at_risk = await on.names(written, victim)
        kill_and_expire(module_cluster, victim)
        try:
            await on.wait_repaired(written, victim)

            async def is_shown() -> bool:
                query = 'bookmender_repairs_total{outcome="done"}'
                return max(await prometheus.values(query)) >= len(at_risk)

            await wait_for(is_shown, "scrape of the last repair")
        finally:
            await asyncio.to_thread(module_cluster.start_bookie, victim)

        async def unanswered() -> list[str]:
            return [
                query
                for query in dashboard_queries()
                if not await prometheus.values(query)
                and not any(part in query for part in MAY_BE_EMPTY)
            ]

        async def are_all_answered() -> bool:
            return not await unanswered()

        with suppress(AssertionError):  # the next line names the queries
            await wait_for(are_all_answered, "data for each query")
        assert await unanswered() == []
        copied = "sum(rate(bookmender_repaired_bytes_total[1m]))"
        assert max(await prometheus.values(copied)) > 0

        jobs = await prometheus.ask("label/job/values", **{"match[]": "bookmender_build_info"})
        assert jobs == [JOB], "the dashboard's variable"
        groups = (await prometheus.ask("rules"))["groups"]
        rules = [rule for group in groups for rule in group["rules"]]
        assert rules
        assert {rule["health"] for rule in rules} == {"ok"}, rules
        assert [rule["name"] for rule in rules if rule["state"] == "firing"] == []
        await on.assert_whole(written)
