"""The rules and the dashboard: what they name exists, and each alert is tested.

promtool runs tests/deploy/alerts.yaml here if it is installed; .ci/run installs it where it can.
"""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from daemon.status.conditions import CONDITIONS
from replication.reasons import Reason

ROOT = Path(__file__).parent.parent.parent
RULES = ROOT / "deploy" / "prometheus" / "bookmender.rules.yaml"
JAVA_NAMES = ROOT / "deploy" / "prometheus" / "java_names.rules.yaml"
ALERT_TESTS = ROOT / "tests" / "deploy" / "alerts.yaml"
DASHBOARD = ROOT / "deploy" / "grafana" / "bookmender.json"
SITE = "https://docs.example.org/bookmender/"
"""The address in the guide."""
FROM_PROMETHEUS = {"up"}
"""Metrics that Prometheus adds to those of a node."""
SUFFIXES = re.compile(r"_(bucket|sum|count)$")
"""Of the series of a histogram."""
KEYWORDS = {"by", "without", "on", "ignoring", "and", "or", "unless", "offset", "bool"}
LABEL_LISTS = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
NOT_METRICS = re.compile(
    r"""
    "[^"]*"                      # texts
    | \{ [^{}]* \}               # label matchers, whose texts are removed before
    | \[ [^\]]* \]               # ranges
    | \b \w+ (?= \s* \()         # functions, and aggregations
    | \b offset \s+ \w+
    """,
    re.VERBOSE,
)


def metrics_in(expression: str) -> set[str]:
    """Return the metric names of a PromQL expression."""
    text = re.sub(r'"[^"]*"', '""', expression)
    text = LABEL_LISTS.sub(" ", text)
    text = re.sub(r"\b(sum|min|max|count|avg)\s+\(", r"\1(", text)
    text = NOT_METRICS.sub(" ", text)
    return set(re.findall(r"(?<![\w.])[a-zA-Z_:]\w*", text)) - KEYWORDS


@pytest.mark.parametrize(
    ("expression", "metrics"),
    [
        ('max by (job) (a_b{x="c > d", y=~"e.*"}) > 0', {"a_b"}),
        (
            "sum(rate(a_total[5m])) / on (job) group_left (z) b unless c offset 15m",
            {"a_total", "b", "c"},
        ),
        ("histogram_quantile(0.9, sum by (le, step) (rate(a_bucket[1m]))) == 1e3", {"a_bucket"}),
        ("sum by (job) (time() - a) or a == 1", {"a"}),
        ("max(a{} >= 0) and on (job) max by (job) (b) - 8 * 86400 > bool 1", {"a", "b"}),
    ],
)
def test_the_metrics_of_an_expression_are_found(expression: str, metrics: set[str]) -> None:
    assert metrics_in(expression) == metrics


@pytest.fixture(scope="module")
def documented() -> dict[str, set[str]]:
    """The labels of each metric in docs/metrics.md."""
    rows = re.findall(
        r"^\| `(\w+)` \| (\w+) \| (.*?) \|", (ROOT / "docs" / "metrics.md").read_text(), flags=re.M
    )
    found = {}
    for name, kind, labels in rows:
        names = {f"{name}_{part}" for part in ("bucket", "sum", "count")}
        for each in names if kind == "histogram" else {name}:
            found[each] = set(re.findall(r"\w+", labels)) | {"job", "instance", "le"}
    return found


# --- Alerts ---------------------------------------------------------------------------------------


def rules_of(file: Path) -> list[Any]:
    groups = yaml.safe_load(file.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def alerts() -> list[Any]:
    return rules_of(RULES)


each_alert = pytest.mark.parametrize("alert", alerts(), ids=lambda alert: alert["alert"])


@each_alert
def test_an_alert_is_complete(alert: Any) -> None:
    assert alert["alert"].startswith("Bookmender")
    assert re.fullmatch(r"\d+[mh]", alert["for"])
    assert alert["labels"] in ({"severity": "critical"}, {"severity": "warning"})
    assert set(alert["annotations"]) == {"summary", "description", "runbook"}
    assert alert["annotations"]["description"].endswith(".")


@each_alert
def test_an_alert_uses_documented_metrics(alert: Any, documented: dict[str, set[str]]) -> None:
    used = metrics_in(alert["expr"])

    assert used
    assert used - documented.keys() - FROM_PROMETHEUS == set()


@each_alert
def test_the_text_of_an_alert_uses_labels_that_the_alert_has(
    alert: Any, documented: dict[str, set[str]]
) -> None:
    kept = re.match(r"(?:.*?- )?\w+ by \(([\w, ]+)\)", alert["expr"].strip())
    (first, *_) = sorted(metrics_in(alert["expr"]) - FROM_PROMETHEUS) or ["up"]
    labels = set(kept[1].split(", ")) if kept else documented.get(first, {"job", "instance"})
    used = set(re.findall(r"\$labels\.(\w+)", " ".join(alert["annotations"].values())))

    assert used
    assert used <= labels


@each_alert
def test_the_runbook_of_an_alert_exists(alert: Any) -> None:
    page, _, anchor = alert["annotations"]["runbook"].partition("#")
    headings = re.findall(r"^#+ (.+)$", (ROOT / page).read_text(), flags=re.MULTILINE)

    assert not anchor or anchor in [re.sub(r"[^\w-]", "", h.lower()) for h in headings]


def test_the_command_of_the_guide_makes_links_to_the_pages_of_the_site() -> None:
    guide = (ROOT / "docs" / "monitoring.md").read_text()
    (script,) = re.findall(r"sed '(s\|runbook: [^']+)'", guide)
    told = subprocess.run(
        ["sed", script, str(RULES)], capture_output=True, text=True, timeout=30, check=True
    )
    groups = yaml.safe_load(told.stdout)["groups"]
    links = [rule["annotations"]["runbook_url"] for group in groups for rule in group["rules"]]

    assert links == [  # mkdocs makes a folder of each page
        re.sub(r"^docs/([a-z-]+)\.md", rf"{SITE}\1/", alert["annotations"]["runbook"])
        for alert in alerts()
    ]


def test_every_alert_is_seen_to_fire_and_not_to_fire() -> None:
    tests = yaml.safe_load(ALERT_TESTS.read_text())["tests"]
    expected = [
        [sample["labels"] for sample in each.get("exp_samples", [])]
        for test in tests
        for each in test.get("promql_expr_test", [])
    ]
    for alert in alerts():
        fires = [f'{{alertname="{alert["alert"]}"}}' in labels for labels in expected]
        assert any(fires), alert["alert"]
        assert not all(fires), alert["alert"]


def test_every_condition_has_an_alert_of_its_own_or_the_common_one() -> None:
    (common,) = [each for each in alerts() if each["alert"] == "BookmenderCondition"]
    (pattern,) = re.findall(r'code!~"([^"]+)"', common["expr"])
    anchors = {each["annotations"]["runbook"].partition("#")[2].upper() for each in alerts()}
    named = {code for each in alerts() for code in re.findall(r'code="([A-Z_]+)"', each["expr"])}

    assert set(pattern.split("|")) == (anchors & CONDITIONS.keys()) - {"LEDGERS_DAMAGED"}
    assert named <= anchors


def test_every_alert_is_in_the_guide() -> None:
    guide = (ROOT / "docs" / "monitoring.md").read_text()
    rows = re.findall(r"^\| `(Bookmender\w+)` \| (\w+) \|", guide, flags=re.MULTILINE)

    assert rows == [(alert["alert"], alert["labels"]["severity"]) for alert in alerts()]


def test_promtool_accepts_the_rules_and_their_tests() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian: apt install prometheus)")
    for arguments in (
        ("check", "rules", str(RULES), str(JAVA_NAMES)),
        ("test", "rules", str(ALERT_TESTS)),
    ):
        ended = subprocess.run(
            [promtool, *arguments], capture_output=True, text=True, timeout=300, check=False
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr


def test_java_names_are_made_of_documented_metrics_and_labels(
    documented: dict[str, set[str]],
) -> None:
    rules = rules_of(JAVA_NAMES)
    for rule in rules:
        (used,) = metrics_in(rule["expr"])
        labels = re.findall(r"(\w+)!?[=~]", rule["expr"])
        assert {*labels, *re.findall(r"without \((\w+)\)", rule["expr"])} <= documented[used], rule
    graces = {reason.value for reason in Reason if reason.is_a_grace}
    (deferrals,) = re.findall(r'reason!~"([^"]+)"', str(rules))
    assert set(deferrals.split("|")) == graces
    series = [(rule["record"], tuple(rule.get("labels", {}).items())) for rule in rules]
    assert len(series) == len(set(series))


# --- The dashboard --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dashboard() -> Any:
    return json.loads(DASHBOARD.read_text())


def panels_of(dashboard: Any) -> list[Any]:
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def queries_of(dashboard: Any) -> Iterator[tuple[str, str]]:
    """Yield the title of the panel and the expression of each query."""
    for panel in panels_of(dashboard):
        for target in panel["targets"]:
            yield panel["title"], target["expr"]


def test_the_dashboard_uses_documented_metrics_of_the_chosen_job(
    dashboard: Any, documented: dict[str, set[str]]
) -> None:
    for title, expression in queries_of(dashboard):
        used = metrics_in(expression)
        assert used, title
        assert used - documented.keys() == set(), title
        matchers = re.findall(r"(bookmender_\w+)(\{[^}]*\})?", expression)
        assert all('job="$job"' in matcher for _, matcher in matchers), title


def test_the_legends_use_labels_that_the_queries_keep(dashboard: Any) -> None:
    for panel in panels_of(dashboard):
        for target in panel["targets"]:
            used = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            kept = {
                label
                for labels in re.findall(r"by \(([\w, ]+)\)", target["expr"])
                for label in labels.split(", ")
            } or {"job", "instance"}
            assert used <= kept, panel["title"]


def test_the_panels_do_not_overlap_and_need_no_plugin(dashboard: Any) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24, panel["title"]
        taken |= cells
    ids = [panel["id"] for panel in dashboard["panels"]]

    assert len(ids) == len(set(ids))
    assert {panel["type"] for panel in dashboard["panels"]} == {"row", "stat", "timeseries"}
    assert all(panel["description"] for panel in panels_of(dashboard))


def test_the_dashboard_can_be_imported_anywhere(dashboard: Any) -> None:
    variables = {each["name"]: each for each in dashboard["templating"]["list"]}
    sources = {
        json.dumps(each["datasource"])
        for panel in panels_of(dashboard)
        for each in (panel, *panel["targets"])
    }

    assert list(variables) == ["datasource", "job", "instance"]
    assert sources == {json.dumps({"type": "prometheus", "uid": "${datasource}"})}
    assert "id" not in dashboard
    assert dashboard["schemaVersion"] >= 41
