"""What ``deploy/make-dist`` builds: each package is installed in an empty environment, without a
package index, and used there as its user would."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from daemon.local import jars

pytestmark = [pytest.mark.long(group="packages"), pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
HERE = f"{sys.version_info.major}.{sys.version_info.minor}"
PYTHONS = sorted({HERE, "3.13"})
URI = "zk+hierarchical://127.0.0.1:9/ledgers"
"""No ZooKeeper is there."""
PACKAGES = ("ledgers", "replication", "auditor", "checkpoints", "archive", "daemon")


def run(
    *command: str | Path,
    folder: Path | None = None,
    expect: int | None = 0,
    environment: Mapping[str, str] | None = None,
) -> str:
    """Return what the command prints. ``expect``: its exit code; None: any."""
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        check=False,
    )
    assert expect in (None, done.returncode), f"{command}: {done.returncode}\n{done.stdout}"
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    run(
        ROOT / "deploy" / "make-dist",
        folder,
        environment={**os.environ, "PYTHONS": " ".join(PYTHONS)},
    )
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (wheel,) = dist.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def offline(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the unpacked archive for hosts without network."""
    folder = tmp_path_factory.mktemp("offline")
    (archive,) = dist.glob("*-offline-*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    (unpacked,) = folder.iterdir()
    return unpacked


@pytest.fixture(scope="module")
def host(offline: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an environment that the commands of INSTALL made, with pip's index out of reach."""
    environment = tmp_path_factory.mktemp("host") / "bookmender"
    told = (offline / "INSTALL").read_text().replace("/opt/bookmender", str(environment))
    steps = [line.strip() for line in told.splitlines() if re.match(r"    (python3|/)", line)]
    assert len(steps) == 2
    for step in steps:
        words = step.split()
        program = sys.executable if words[0] == "python3" else words[0]
        run(program, *words[1:], folder=offline, environment=without_index())
    return environment


def without_index() -> dict[str, str]:
    return {**clean(), "PIP_INDEX_URL": "http://127.0.0.1:9/", "PIP_CONFIG_FILE": os.devnull}


def clean() -> dict[str, str]:
    """Return the environment without settings of bookmender or of Python."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("BOOKMENDER_", "PYTHON"))}


def bookmender(host: Path, *arguments: str, expect: int = 0, uri: str = URI) -> str:
    environment = clean() | {"BOOKMENDER_METADATA_SERVICE_URI": uri}
    program = host / "bin" / "bookmender"
    return run(program, *arguments, folder=host, expect=expect, environment=environment)


def test_the_wheel_has_every_file_of_the_packages(wheel: Path) -> None:
    tracked = run("git", "ls-files", *PACKAGES, folder=ROOT).split()
    shared = {path.relative_to(ROOT / "deploy").as_posix() for path in installed_files()}

    names = zipfile.ZipFile(wheel).namelist()

    assert set(tracked) - set(names) == set()
    assert {name for name in names if name.split("/")[0] in ("tests", "bench", "docs")} == set()
    assert shared <= {name.rpartition("share/bookmender/")[2] for name in names}


def installed_files() -> list[Path]:
    """Return the files of deploy/ that are not for containers."""
    return [
        path
        for path in (ROOT / "deploy").rglob("*")
        if path.is_file()
        and path.name not in ("Containerfile", "make-dist")
        and "kubernetes" not in path.parts
    ]


def test_the_same_commit_gives_the_same_packages(dist: Path, tmp_path: Path) -> None:
    run(ROOT / "deploy" / "make-dist", tmp_path, environment={**os.environ, "PYTHONS": ""})

    again = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    for path in dist.iterdir():
        if "offline" not in path.name:  # without wheels this time
            assert again[path.name] == path.read_bytes(), path.name


@pytest.mark.parametrize("python", PYTHONS)
def test_the_archive_has_all_wheels_of_a_python(
    offline: Path, host: Path, python: str, tmp_path: Path
) -> None:
    options = f"--dry-run --python-version {python} --only-binary :all: --no-index --require-hashes"
    files = "--find-links wheels -r requirements.lock --target"
    pip = host / "bin" / "pip"
    words = [*options.split(), *files.split(), str(tmp_path)]
    run(pip, "install", *words, folder=offline, environment=without_index())


def test_a_host_has_the_command_and_the_files_for_systemd(host: Path, wheel: Path) -> None:
    version = wheel.name.split("-")[1]
    share = host / "share" / "bookmender"

    assert version in bookmender(host, "--version")
    assert (share / "bookmender.service").is_file()
    if analyze := shutil.which("systemd-analyze"):
        units = host / "units"
        units.mkdir()
        for path in (*share.glob("*.service"), *share.glob("*.timer")):
            text = path.read_text().replace("/opt/bookmender", str(host))
            (units / path.name).write_text(text)
        assert run(analyze, "verify", "--man=no", *units.iterdir()) == ""


def test_fsck_without_its_extra_says_what_to_install(host: Path) -> None:
    said = bookmender(host, "fsck", "run", "--output", str(host / "results"), expect=2)

    assert "pip install 'bookmender[fsck]'" in said
    assert "Traceback" not in said


@pytest.mark.cluster
def test_a_host_runs_a_local_cluster_and_names_the_extra_of_the_feed(
    host: Path, tmp_path: Path
) -> None:
    jars.fetch(jars.BOOKKEEPER_DEFAULT)
    data = ("--data", str(tmp_path / "cluster"))
    try:
        bookmender(host, "local", "up", *data, "--bookies", "1")
        uri = json.loads(bookmender(host, "local", "status", *data, "-o", "json"))[
            "metadata_service_uri"
        ]
        without_a_node = bookmender(host, "status", expect=3, uri=uri)
        feed = ("feed", "follow", "--client", "a", "--store", "sqlite:///x")
        said = bookmender(host, *feed, expect=2, uri=uri)
    finally:
        bookmender(host, "local", "down", "--delete", *data)

    assert "1 writable" in without_a_node
    assert "pip install 'bookmender[feed]'" in said
