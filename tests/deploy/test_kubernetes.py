"""The manifests of deploy/kubernetes: they fit each other, the image and the settings."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from daemon.http.openapi import describe
from daemon.settings import Settings, load_settings
from tests.deploy.given_commands import refusal

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / "deploy" / "kubernetes"
FILES = sorted(FOLDER.glob("*.yaml"))
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
    (document,) = yaml.safe_load_all((FOLDER / f"{name}.yaml").read_text())
    return document


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
    return load_settings(path, OF_SERVICE)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_manifest_is_complete(path: Path) -> None:
    document = manifest(path.stem)

    assert document["apiVersion"]
    assert document["kind"]
    if document["kind"] != "Kustomization":
        assert document["metadata"]["name"] == "bookmender"
        assert document["metadata"]["labels"]


def test_the_kustomization_has_every_manifest_and_the_image(container: Any) -> None:
    kustomization = manifest("kustomization")

    assert sorted(kustomization["resources"]) == [
        path.name for path in FILES if path.stem != "kustomization"
    ]
    assert [image["name"] for image in kustomization["images"]] == [container["image"]]


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


def test_the_settings_are_mounted_where_the_command_reads_them(pod: Any, container: Any) -> None:
    folder, _, name = container["args"][-1].rpartition("/")
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    (volume,) = pod["spec"]["volumes"]

    assert mounts[volume["name"]] == folder
    assert volume["configMap"]["name"] == manifest("settings")["metadata"]["name"]
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

    assert load_settings(path, {}).placement.racks_znode == "/bookies"


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
