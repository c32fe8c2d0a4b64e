"""The house itself: imports, locks, make targets, and what no file of the repository may name."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES_BELOW_DAEMON = ("auditor", "replication", "ledgers")


def tracked_files() -> list[Path]:
    """What git would publish: tracked files that are still there."""
    listing = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True, timeout=30
    )
    return [path for name in listing.stdout.split("\0") if (path := ROOT / name).is_file()]


def modules_of(package: str) -> list[Path]:
    return [path for path in (ROOT / package).rglob("*.py") if not path.stem.endswith("_pb2")]


# --- Only daemon/ reads environment, files and signals ------------------------------------------

OUTSIDE_WORLD = {"environ", "environb", "getenv", "argv"}


def reads_of_the_outside(source: str) -> Iterator[str]:
    """What a module takes from its process's surroundings: ``os.environ``, ``sys.argv``, ``open``."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(value=ast.Name(id="os" | "sys"), attr=name):
                if name in OUTSIDE_WORLD:
                    yield f"line {node.lineno}: {name}"
            case ast.ImportFrom(module="os" | "sys", names=names):
                yield from (
                    f"line {node.lineno}: {name.name}"
                    for name in names
                    if name.name in OUTSIDE_WORLD
                )
            case ast.Call(func=ast.Name(id="open" | "input" as name)):
                yield f"line {node.lineno}: {name}"


@pytest.mark.parametrize(
    "source",
    [
        pytest.param("import os\nos.environ['HOME']", id="environment"),
        pytest.param("import os\nos.getenv('HOME')", id="environment by call"),
        pytest.param("from sys import argv", id="command line"),
        pytest.param("open('settings')", id="file"),
    ],
)
def test_a_read_of_the_outside_world_is_seen(source: str) -> None:
    assert list(reads_of_the_outside(source))


@pytest.mark.parametrize("package", PACKAGES_BELOW_DAEMON)
def test_only_the_daemon_reads_environment_arguments_and_files(package: str) -> None:
    found = {
        str(path.relative_to(ROOT)): reads
        for path in modules_of(package)
        if (reads := list(reads_of_the_outside(path.read_text())))
    }

    assert found == {}


# --- Locks ---------------------------------------------------------------------------------------


@pytest.fixture(params=["requirements.lock", "requirements-dev.lock"])
def lock(request: pytest.FixtureRequest) -> str:
    return (ROOT / str(request.param)).read_text()


def test_every_pinned_package_has_hashes(lock: str) -> None:
    entries = re.split(r"\n(?=\S)", lock)
    pins = [entry for entry in entries if not entry.startswith("#")]

    assert pins
    assert [pin for pin in pins if not re.match(r"[\w.-]+==\S+( ;.*)? \\\n +--hash=", pin)] == []


def test_a_lock_names_no_index(lock: str) -> None:
    assert not re.search(r"://|--(extra-)?index-url|--find-links|--trusted-host", lock)


def test_the_locks_pin_all_that_pyproject_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    daemon = project["project"]["dependencies"]
    everything = [
        *daemon,
        *project["project"]["optional-dependencies"]["local"],
        *project["dependency-groups"]["dev"],
    ]

    assert names(daemon) <= names((ROOT / "requirements.lock").read_text().splitlines())
    assert names(everything) <= names((ROOT / "requirements-dev.lock").read_text().splitlines())


def names(requirements: list[str]) -> set[str]:
    """Package names at the start of requirement lines, in the form that indexes compare."""
    matches = (re.match(r"[A-Za-z0-9][\w.-]*", line) for line in requirements)
    return {re.sub(r"[-_.]+", "-", match.group()).lower() for match in matches if match}


# --- Nothing names the machine or the registry it was made with ----------------------------------

FORBIDDEN = re.compile(
    r"""
    (?<![\w.}>/-]) / (work|root|Users) / [\w.]   # somebody's directories
    | /home/(?!\$)\w+/
    | \b (?:files\.)?pythonhosted\.org | \b pypi\.org
    | \b repo\d*\.maven\.(?:apache\.)?org | \b registry\.npmjs | \b (?:deb|security)\.debian\.org
    """,
    re.VERBOSE,
)


@pytest.mark.parametrize(
    ("text", "is_forbidden"),
    [
        pytest.param("cd " + "/wor" + "k/main", True, id="a workplace"),
        pytest.param("'/ro" + "ot/.m2'", True, id="a home directory"),
        pytest.param("https://repo1." + "maven.org/maven2", True, id="a jar registry"),
        pytest.param("--index-url https://py" + "pi.org/simple", True, id="a package index"),
        pytest.param("{chroot}/root/x", False, id="a znode that is called root"),
        pytest.param("https://www.apache.org/licenses/", False, id="the licence's own address"),
    ],
)
def test_the_pattern_of_forbidden_names(text: str, is_forbidden: bool) -> None:
    assert bool(FORBIDDEN.search(text)) is is_forbidden


def test_no_file_names_a_machine_or_a_registry() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:120]}"
        for path in tracked_files()
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1)
        if FORBIDDEN.search(line)
    ]

    assert found == []


# --- What the documents promise ------------------------------------------------------------------


def make_targets() -> set[str]:
    makefile = (ROOT / "Makefile").read_text()
    return set(re.findall(r"^([a-z]+):", makefile, flags=re.MULTILINE))


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", ".ci/run"])
def test_every_make_command_in_a_document_exists(document: str) -> None:
    named = set(re.findall(r"(?:^|`|\$ )make ([a-z]+)", (ROOT / document).read_text(), flags=re.M))

    assert named
    assert named <= make_targets()


def test_relative_links_in_the_documents_lead_somewhere() -> None:
    documents = [path for path in tracked_files() if path.suffix == ".md"]
    links = [
        (document, target)
        for document in documents
        for target in re.findall(r"\]\((?!\w+://|#)([^)#\s]+)", document.read_text())
    ]

    assert [
        f"{document.name}: {target}"
        for document, target in links
        if not (document.parent / target).exists()
    ] == []


def test_the_command_explains_itself() -> None:
    command = subprocess.run(
        [sys.executable, "-m", "daemon.cli", "--help"],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert command.returncode == 0, command.stderr
    assert re.search(r"^\s+demo\s+\S", command.stdout, flags=re.MULTILINE), command.stdout
