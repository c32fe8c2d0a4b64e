"""deploy/Containerfile, read without building it."""

import re
import shlex
import tomllib
from fnmatch import fnmatch
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


def sources() -> list[str]:
    """Return what is copied from the checkout."""
    copies = [shlex.split(copy) for copy in of("COPY") if not copy.startswith("--from")]
    return [source for copy in copies for source in copy[:-1]]


def test_every_package_is_copied() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = project["tool"]["setuptools"]["packages"]["find"]["include"]

    assert all(any(fnmatch(source, package) for source in sources()) for package in packages)
    assert [source for source in sources() if not (ROOT / source).exists()] == []


def test_what_is_copied_is_not_ignored() -> None:
    ignore = (ROOT / ".dockerignore").read_text().splitlines()
    let_through = {line[1:] for line in ignore if line.startswith("!")}

    assert "*" in ignore
    assert let_through == set(sources())


def test_it_runs_as_a_user_without_a_name_to_look_up() -> None:
    """Kubernetes can prove ``runAsNonRoot`` only for a number."""
    (user,) = of("USER")

    assert re.fullmatch("[1-9][0-9]*:[1-9][0-9]*", user)


def test_its_command_exists() -> None:
    assert of("ENTRYPOINT") == ['["bookmender"]']
    (command,) = of("CMD")
    assert refusal(re.findall(r'"([^"]+)"', command)) is None


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
