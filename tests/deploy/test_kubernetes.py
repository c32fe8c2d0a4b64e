"""The manifests of deploy/kubernetes: they fit each other, the image and the settings.

kubectl composes the overlays where it is installed. Each manifest is validated without it, too.
"""

import json
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from daemon.http.openapi import describe
from daemon.settings import Settings, load_settings
from tests.deploy.given_commands import refusal

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / "deploy" / "kubernetes"
FILES = sorted(FOLDER.rglob("*.yaml"))
KUBERNETES = "1.34"
"""The release whose schemas decide."""
OPERATOR_SCHEMAS = yaml.safe_load(Path(__file__).with_name("operator_schemas.yaml").read_text())
"""By kind, for the objects of the Prometheus operator."""
KUBECTL = shutil.which("kubectl")
URI = "zk+hierarchical://zk1:2181/ledgers"
OVERLAYS = {"trial": 2, "production": 20}
"""With their number of nodes."""
OF_SERVICE = {
    "BOOKMENDER_SERVICE_HOST": "10.96.0.7",
    "BOOKMENDER_SERVICE_PORT": "7318",
    "BOOKMENDER_SERVICE_PORT_HTTP": "7318",
    "BOOKMENDER_PORT": "tcp://10.96.0.7:7318",
    "BOOKMENDER_PORT_7318_TCP": "tcp://10.96.0.7:7318",
    "BOOKMENDER_PORT_7318_TCP_PROTO": "tcp",
    "BOOKMENDER_PORT_7318_TCP_PORT": "7318",
    "BOOKMENDER_PORT_7318_TCP_ADDR": "10.96.0.7",
}
"""What the kubelet sets for the Service ``bookmender`` where ``enableServiceLinks`` stays true."""


def manifest(name: str) -> Any:
    (path,) = (path for path in FILES if path.stem == name)
    (document,) = yaml.safe_load_all(path.read_text())
    return document


def validate(document: Any) -> None:
    if schema := OPERATOR_SCHEMAS.get(document["kind"]):
        jsonschema.validate(document, schema)
    else:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)


@pytest.fixture
def pod() -> Any:
    return manifest("statefulset")["spec"]["template"]


@pytest.fixture
def container(pod: Any) -> Any:
    (container,) = pod["spec"]["containers"]
    return container


@pytest.fixture
def settings_text() -> str:
    return str(manifest("settings")["data"]["bookmender.toml"])


@pytest.fixture
def settings(settings_text: str, tmp_path: Path) -> Settings:
    path = tmp_path / "bookmender.toml"
    path.write_text(settings_text)
    return load_settings(path, OF_SERVICE | {"BOOKMENDER_METADATA_SERVICE_URI": URI})


@pytest.mark.parametrize(
    "path", [path for path in FILES if path.stem != "kustomization"], ids=lambda path: path.name
)
def test_a_manifest_is_valid_and_used(path: Path) -> None:
    document = manifest(path.stem)
    kustomization = yaml.safe_load((path.parent / "kustomization.yaml").read_text())

    validate(document)
    assert document["metadata"]["labels"]["app.kubernetes.io/name"] == document["metadata"]["name"]
    assert path.name in kustomization["resources"]


@pytest.fixture(scope="module")
def overlays(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Return the objects of each overlay, composed with a token."""
    if KUBECTL is None:
        pytest.skip("kubectl is not installed")
    tree = tmp_path_factory.mktemp("manifests") / "kubernetes"
    shutil.copytree(FOLDER, tree)
    (tree / "base" / "token").write_text("not a secret, only a test")
    return {name: compose(tree / "overlays" / name) for name in OVERLAYS}


def compose(overlay: Path) -> list[Any]:
    command = [str(KUBECTL), "kustomize", str(overlay)]
    text = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    return list(yaml.safe_load_all(text))


@pytest.mark.parametrize("name", OVERLAYS)
def test_an_overlay_is_complete(overlays: dict[str, list[Any]], name: str) -> None:
    objects = {(each["kind"], each["metadata"]["name"]): each for each in overlays[name]}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = json.dumps(overlays[name])
    images = set(re.findall(r'"image": "([^"]+)"', text))

    for document in overlays[name]:
        validate(document)
    assert objects["StatefulSet", "bookmender"]["spec"]["replicas"] == OVERLAYS[name]
    assert {image.rpartition(":")[2] for image in images} == {project["version"]}
    for kind, pattern in (
        ("ConfigMap", r'"(?:configMap|configMapRef)": {[^}]*"name": "([^"]+)"'),
        ("Secret", r'"secretName": "([^"]+)"'),
        ("PersistentVolumeClaim", r'"claimName": "([^"]+)"'),
    ):
        assert {found for of, found in objects if of == kind} == set(re.findall(pattern, text))


def test_a_trial_changes_nothing_and_production_repairs(overlays: dict[str, list[Any]]) -> None:
    modes = {}
    for name, objects in overlays.items():
        (given,) = (
            each["data"]
            for each in objects
            if each["kind"] == "ConfigMap" and "bookmender.toml" not in each["data"]
        )
        modes[name] = load_settings(None, given).node.mode

    assert modes == {"trial": "observe", "production": "repair"}


def test_the_token_is_made_by_the_operator() -> None:
    (generated,) = manifest_of("base")["secretGenerator"]
    (name,) = generated["files"]
    command = ["git", "check-ignore", f"deploy/kubernetes/base/{name}"]
    tracked = ["git", "ls-files", f"deploy/kubernetes/base/{name}"]

    assert subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode == 0
    assert subprocess.run(tracked, cwd=ROOT, capture_output=True, check=True).stdout == b""


def manifest_of(folder: str) -> Any:
    return yaml.safe_load((FOLDER / folder / "kustomization.yaml").read_text())


def test_the_operators_rules_are_those_of_prometheus(request: pytest.FixtureRequest) -> None:
    path = FOLDER / "monitoring" / "prometheus-rule.yaml"
    head, spec, _ = path.read_text().partition("spec:\n")
    rules = (ROOT / "deploy" / "prometheus" / "bookmender.rules.yaml").read_text()
    lines = rules[rules.index("groups:") :].splitlines()
    wanted = head + spec + "".join(f"  {line}".rstrip() + "\n" for line in lines)
    if request.config.getoption("--update"):
        path.write_text(wanted)

    assert path.read_text() == wanted, "pytest --update writes it again"


def test_fsck_runs_the_command_of_the_unit() -> None:
    unit = (ROOT / "deploy" / "bookmender-fsck.service").read_text().replace("\\\n", " ")
    (command,) = re.findall(r"^ExecStart=\S+ (.+)$", unit, flags=re.MULTILINE)
    pod = manifest("cron-job")["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}

    assert container["args"] == shlex.split(command)
    assert mounts == {"/etc/bookmender", "/var/lib/bookmender-fsck", "/tmp"}


def test_all_selectors_find_the_pods(pod: Any) -> None:
    labels = pod["metadata"]["labels"]
    spread = pod["spec"]["affinity"]["podAntiAffinity"]
    (term,) = spread["preferredDuringSchedulingIgnoredDuringExecution"]

    assert manifest("statefulset")["spec"]["selector"]["matchLabels"] == labels
    assert manifest("service")["spec"]["selector"] == labels
    assert manifest("disruption-budget")["spec"]["selector"]["matchLabels"] == labels
    assert term["podAffinityTerm"]["labelSelector"]["matchLabels"] == labels
    assert manifest("statefulset")["spec"]["serviceName"] == manifest("service")["metadata"]["name"]


def test_the_container_runs_a_command_that_exists(container: Any) -> None:
    assert "command" not in container, "the image's entry point is bookmender"
    assert refusal(container["args"]) is None


def test_the_settings_are_mounted_where_the_command_reads_them(
    pod: Any, container: Any, settings: Settings
) -> None:
    folder, _, name = container["args"][-1].rpartition("/")
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}

    assert mounts["settings"] == folder
    assert volumes["settings"]["configMap"]["name"] == manifest("settings")["metadata"]["name"]
    assert settings.http.token_file == f"{mounts['token']}/token"
    assert name in manifest("settings")["data"]


def test_the_journal_is_on_a_volume_that_stays(settings: Settings, container: Any) -> None:
    (claim,) = manifest("statefulset")["spec"]["volumeClaimTemplates"]
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}

    assert mounts[settings.node.state_dir] == claim["metadata"]["name"]


def test_settings_that_are_commented_out_are_right_as_well(
    settings_text: str, tmp_path: Path
) -> None:
    path = tmp_path / "bookmender.toml"
    path.write_text(re.sub(r"^#(?=\w+ = )", "", settings_text, flags=re.MULTILINE))

    given = {"BOOKMENDER_METADATA_SERVICE_URI": URI}
    assert load_settings(path, given).placement.racks_znode == "/bookies"


def test_the_probes_reach_the_http_server(settings: Settings, container: Any, pod: Any) -> None:
    (port,) = container["ports"]
    paths = {name: container[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "liveness")}

    assert settings.http.enabled
    assert not settings.http.is_loopback, "the kubelet asks from outside of the pod"
    assert port["containerPort"] == settings.http.port
    assert paths == {"startup": "/healthz", "liveness": "/healthz"}, (
        "a node that waits for ZooKeeper must not be restarted"
    )
    assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"
    assert {"/healthz", "/readyz", "/metrics"} <= set(describe()["paths"])
    assert pod["metadata"]["annotations"]["prometheus.io/port"] == str(settings.http.port)
    (exposed,) = manifest("service")["spec"]["ports"]
    assert exposed["port"] == settings.http.port
    assert exposed["targetPort"] == port["name"]
    (let_in,) = manifest("network-policy")["spec"]["ingress"]
    assert [each["port"] for each in let_in["ports"]] == [settings.http.port]
    assert all(
        container[f"{name}Probe"]["httpGet"]["port"] == port["name"]
        for name in ("startup", "liveness", "readiness")
    )


def test_it_starts_before_the_startup_probe_gives_up(settings: Settings, container: Any) -> None:
    probe = container["startupProbe"]

    assert probe["periodSeconds"] * probe["failureThreshold"] > (
        2 * settings.zookeeper.connect_timeout_s
    )


def test_the_pod_has_no_rights(pod: Any, container: Any) -> None:
    containerfile = (ROOT / "deploy" / "Containerfile").read_text()
    context = pod["spec"]["securityContext"]
    user = f"USER {context['runAsUser']}:{context['runAsGroup']}"

    assert context["runAsNonRoot"] is True
    assert user in containerfile
    assert context["fsGroup"] == context["runAsGroup"], "the volume of the journal is writable"
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod["spec"]["automountServiceAccountToken"] is False
