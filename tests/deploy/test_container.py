"""deploy/Containerfile, read without building it."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from daemon.settings import HttpSettings, load_settings
from tests.daemon.settings_given import URI, VARIABLE
from tests.deploy.given_commands import refusal

ROOT = Path(__file__).parent.parent.parent
FILE = ROOT / "deploy" / "Containerfile"


def instructions() -> list[tuple[str, str]]:
    """Return the instructions in order, with their arguments."""
    text = re.sub(r"^#.*\n", "", FILE.read_text(), flags=re.MULTILINE)
    lines = re.sub(r"\\\n\s*", " ", text).splitlines()
    return [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in lines if line.strip()]


def of(kind: str) -> list[str]:
    return [arguments for name, arguments in instructions() if name == kind]


def test_hadolint_finds_nothing() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    ended = subprocess.run([hadolint, FILE], capture_output=True, text=True, check=False)

    assert ended.stdout + ended.stderr == ""
    assert ended.returncode == 0


def test_python_packages_are_installed_by_hash_only() -> None:
    installs = [each for run in of("RUN") for each in run.split("&&") if "pip install" in each]

    assert installs
    assert [each for each in installs if "--require-hashes" not in each] == []


def test_only_files_of_the_archive_are_copied() -> None:
    script = (ROOT / "deploy" / "make-dist").read_text()
    copies = [shlex.split(copy)[:-1] for copy in of("COPY") if not copy.startswith("--from")]

    assert copies
    assert [name for copy in copies for name in copy if f"$name/{name}" not in script] == []


def test_it_runs_as_a_user_without_a_name_to_look_up() -> None:
    """Kubernetes can prove ``runAsNonRoot`` only for a number."""
    first, *_, last = of("USER")

    assert first == last
    assert re.fullmatch("[1-9][0-9]*:[1-9][0-9]*", last)


def test_its_command_exists() -> None:
    assert of("ENTRYPOINT") == ['["bookmender"]']
    commands = [re.findall(r'"([^"]+)"', command) for command in of("CMD")]

    assert commands[0] == ["daemon"]
    assert [refusal(command) for command in commands if "--help" not in command] == [None]


def test_its_environment_has_settings_that_exist() -> None:
    (environment,) = of("ENV")
    given = dict(each.split("=", 1) for each in shlex.split(environment))

    settings = load_settings(None, {VARIABLE: URI, **given})

    assert of("VOLUME") == [settings.node.state_dir]
    assert given["PATH"].startswith("/opt/bookmender/bin:")


def test_the_port_is_that_of_the_http_server() -> None:
    assert of("EXPOSE") == [str(HttpSettings().port)]


@pytest.mark.parametrize(
    "line", re.findall(r"podman exec CONTAINER bookmender (.+)", FILE.read_text())
)
def test_the_example_of_a_command_exists(line: str) -> None:
    assert refusal(shlex.split(line)) is None
