"""House rules: imports, locks, make targets, documents, and names that no file may contain."""

import ast
import dataclasses
import graphlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import grimp
import pytest

from daemon.cli.main import cli
from daemon.settings import NodeSettings, Settings, load_settings
from tests.compat.catalogue import load_catalogue
from tests.compat.document import faults, page
from tests.compat.gathering import look

ROOT = Path(__file__).parent.parent
PACKAGES_BELOW_DAEMON = (
    "archive",
    "notifications",
    "checkpoints",
    "auditor",
    "replication",
    "ledgers",
)


def tracked_files() -> list[Path]:
    """Return the files that git would publish: tracked files that still exist."""
    listing = subprocess.run(
        ["git", "-c", "safe.directory=*", "ls-files", "-z"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
        timeout=30,
    )
    return [path for name in listing.stdout.split("\0") if (path := ROOT / name).is_file()]


def modules_of(package: str) -> list[Path]:
    return [path for path in (ROOT / package).rglob("*.py") if not path.stem.endswith("_pb2")]


def errors_logged() -> set[str]:
    """Return the events of level error: by ``log.error``, ``log.exception`` or a wrapper."""
    events: set[str] = set()
    for package in ("daemon", *PACKAGES_BELOW_DAEMON):
        for path in modules_of(package):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                    is_log = ast.unparse(node.func) in ("log.error", "log.exception")
                    if is_log or node.func.attr == "_log_once":
                        told = [
                            n.value for n in ast.walk(node.args[0]) if isinstance(n, ast.Constant)
                        ]
                        events.update(map(str, told))
    return events


# --- Imports --------------------------------------------------------------------------------------


def test_the_daemon_has_no_import_cycle() -> None:
    graph = grimp.build_graph("daemon", cache_dir=None)
    imports = {m: graph.find_modules_directly_imported_by(m) for m in graph.modules}

    graphlib.TopologicalSorter(imports).prepare()  # raises CycleError that names the circle


# --- Only daemon/ reads environment and arguments (signals: import-linter, in pyproject.toml) -----

OUTSIDE_WORLD = {"environ", "environb", "getenv", "argv"}


def reads_of_the_outside(source: str) -> Iterator[str]:
    """Yield a module's reads of its process's environment: ``os.environ``, ``sys.argv``."""
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


@pytest.mark.parametrize(
    "source",
    [
        pytest.param("import os\nos.environ['HOME']", id="environment"),
        pytest.param("import os\nos.getenv('HOME')", id="environment by call"),
        pytest.param("from sys import argv", id="command line"),
    ],
)
def test_reads_of_the_environment_are_found(source: str) -> None:
    assert list(reads_of_the_outside(source))


@pytest.mark.parametrize("package", PACKAGES_BELOW_DAEMON)
def test_only_the_daemon_reads_environment_and_arguments(package: str) -> None:
    found = {
        str(path.relative_to(ROOT)): reads
        for path in modules_of(package)
        if (reads := list(reads_of_the_outside(path.read_text())))
    }

    assert found == {}


# --- Secrets --------------------------------------------------------------------------------------


def test_every_field_with_a_secret_hides_it() -> None:
    """Its type is ``Secret``, or its representation leaves it out."""
    found = [
        f"{path.relative_to(ROOT)}:{field.lineno}: {ast.unparse(field)}"
        for package in ("daemon", *PACKAGES_BELOW_DAEMON)
        for path in modules_of(package)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
        for field in node.body
        if isinstance(field, ast.AnnAssign)
        and re.search("(password|secret|token)$", ast.unparse(field.target))
        and not re.search(r"Secret\[|repr=False|: int\b", ast.unparse(field))
    ]

    assert found == []


# --- Only daemon/ advises commands ----------------------------------------------------------------

APPLICATION_NAME = "bookmender fsck"
"""Spark shows this name; it is no advice."""


def commands_in_strings(source: str) -> Iterator[str]:
    """Yield strings that name a command, such as ``bookmender queue``, without docstrings."""
    tree = ast.parse(source)
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    command = re.compile(rf"\bbookmender ({'|'.join(cli.list_commands(click.Context(cli)))})\b")
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            is_text = id(node) not in docstrings and node.value != APPLICATION_NAME
            if is_text and command.search(node.value):
                yield f"line {node.lineno}: {node.value[:80]}"


@pytest.mark.parametrize(
    ("source", "is_found"),
    [
        pytest.param("x = 'run bookmender queue'", True, id="a string"),
        pytest.param("x = f'bookmender ledger close {y}'", True, id="a part of an f-string"),
        pytest.param("x = 1\n'bookmender queue'", False, id="a docstring"),
        pytest.param("x = 'bookmender is slow'", False, id="no command"),
    ],
)
def test_commands_in_strings_are_found(source: str, is_found: bool) -> None:
    assert bool(list(commands_in_strings(source))) is is_found


@pytest.mark.parametrize("package", PACKAGES_BELOW_DAEMON)
def test_no_string_below_the_daemon_names_a_command(package: str) -> None:
    found = {
        str(path.relative_to(ROOT)): strings
        for path in modules_of(package)
        if (strings := list(commands_in_strings(path.read_text())))
    }

    assert found == {}


# --- No text is lost ------------------------------------------------------------------------------


def texts_without_use(source: str) -> Iterator[str]:
    """Yield strings that are statements of their own, without docstrings (in triple quotes).

    Without its brackets, the second line of a text is such a statement.
    """
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.JoinedStr | ast.Constant):
            text = lines[node.lineno - 1][node.col_offset :]
            if not text.startswith(('"""', 'r"""', "...")):
                yield f"line {node.lineno}: {text[:80]}"


@pytest.mark.parametrize(
    ("source", "is_found"),
    [
        pytest.param("why = 'Give each '\n'folder its own'", True, id="a second line"),
        pytest.param("why = 'Give each '\nf'folder {its} own'", True, id="an f-string"),
        pytest.param("why = ('Give each '\n'folder its own')", False, id="brackets"),
        pytest.param('x = 1\n"""What it is."""', False, id="a docstring"),
        pytest.param("def f() -> None: ...", False, id="an ellipsis"),
    ],
)
def test_texts_without_use_are_found(source: str, is_found: bool) -> None:
    assert bool(list(texts_without_use(source))) is is_found


def test_no_text_is_without_use() -> None:
    found = {
        str(path.relative_to(ROOT)): texts
        for path in tracked_files()
        if path.suffix == ".py" and (texts := list(texts_without_use(path.read_text())))
    }

    assert found == {}


# --- A package says what its modules are ----------------------------------------------------------


def unnamed_in(package: Path) -> set[str]:
    """Return modules and packages that the package's docstring does not name, as ``this``.

    Generated modules need no name.
    """
    docstring = ast.get_docstring(ast.parse((package / "__init__.py").read_text())) or ""
    modules = {path.stem for path in package.glob("[!_]*.py") if not path.stem.endswith("_pb2")}
    packages = {path.parent.name for path in package.glob("*/__init__.py")}
    return (modules | packages) - set(re.findall(r"``(\w+)/?``", docstring))


def test_every_package_names_its_modules() -> None:
    packages = [
        path.parent
        for package in (*PACKAGES_BELOW_DAEMON, "daemon")
        for path in modules_of(package)
        if path.name == "__init__.py"
    ]

    assert packages
    assert {str(p.relative_to(ROOT)): found for p in packages if (found := unnamed_in(p))} == {}


# --- Locks ---------------------------------------------------------------------------------------


@pytest.fixture(params=["requirements.lock", "requirements-dev.lock", "requirements-spark.lock"])
def lock(request: pytest.FixtureRequest) -> str:
    return (ROOT / str(request.param)).read_text()


def test_every_pinned_package_has_hashes(lock: str) -> None:
    entries = re.split(r"\n(?=\S)", lock)
    pins = [entry for entry in entries if not entry.startswith("#")]

    assert pins
    assert [pin for pin in pins if not re.match(r"[\w.-]+==\S+( ;.*)? \\\n +--hash=", pin)] == []


def test_a_lock_names_no_package_index(lock: str) -> None:
    assert not re.search(r"://|--(extra-)?index-url|--find-links|--trusted-host", lock)


def test_the_locks_pin_all_dependencies_of_pyproject() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    daemon = project["project"]["dependencies"]
    everything = [
        *daemon,
        *project["project"]["optional-dependencies"]["fsck"],
        *project["project"]["optional-dependencies"]["feed"],
        *project["dependency-groups"]["dev"],
    ]

    assert names(daemon) <= names((ROOT / "requirements.lock").read_text().splitlines())
    assert names(everything) <= names((ROOT / "requirements-dev.lock").read_text().splitlines())


def names(requirements: list[str]) -> set[str]:
    """Return the package names at the start of requirement lines, normalised for comparison."""
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
        pytest.param("cd " + "/wor" + "k/main", True, id="a work folder"),
        pytest.param("'/ro" + "ot/.m2'", True, id="a home directory"),
        pytest.param("https://repo1." + "maven.org/maven2", True, id="a jar registry"),
        pytest.param("--index-url https://py" + "pi.org/simple", True, id="a package index"),
        pytest.param("{chroot}/root/x", False, id="a znode that is called root"),
        pytest.param("https://www.apache.org/licenses/", False, id="the address of the licence"),
    ],
)
def test_the_pattern_of_forbidden_names(text: str, is_forbidden: bool) -> None:
    assert bool(FORBIDDEN.search(text)) is is_forbidden


def test_no_file_names_a_machine_or_a_registry() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:120]}"
        for path in tracked_files()
        if path != ROOT / "daemon/local/jars.py"  # Maven Central is its default
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1)
        if FORBIDDEN.search(line)
    ]

    assert found == []


# --- docs/compatibility.md ------------------------------------------------------------------------


@pytest.mark.timeout(600)  # it collects all tests
def test_the_compatibility_page_agrees_with_the_markers() -> None:
    """`make compat` runs the tests. Every row has one, on real bookies where the row needs it."""
    rows, witnesses = load_catalogue(), look()

    assert faults(rows, witnesses, has_run=False) == []
    committed = (ROOT / "docs" / "compatibility.md").read_text()
    assert committed == page(rows, witnesses), "make compat ARGS=--draft writes the page"


# --- Documents ------------------------------------------------------------------------------------


def make_targets() -> set[str]:
    makefile = (ROOT / "Makefile").read_text()
    return set(re.findall(r"^([a-z-]+):", makefile, flags=re.MULTILINE))


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", ".ci/run"])
def test_every_make_command_in_a_document_exists(document: str) -> None:
    named = set(re.findall(r"(?:^|`|\$ )make ([a-z-]+)", (ROOT / document).read_text(), flags=re.M))

    assert named
    assert named <= make_targets()


def test_relative_links_in_documents_exist() -> None:
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


HAS_LAYOUT = (ROOT / "replication" / "work_queue.py").exists()


@pytest.mark.parametrize(
    "document",
    [
        pytest.param(
            name,
            marks=pytest.mark.xfail(
                not HAS_LAYOUT and name != "CONTRIBUTING.md",
                reason="the document names files by the layout that has replication/work_queue.py",
                strict=True,
            ),
        )
        for name in ("ARCHITECTURE.md", "CONTRIBUTING.md")
    ],
)
def test_every_file_that_a_document_names_exists(document: str) -> None:
    text = (ROOT / document).read_text()
    named = set(re.findall(r"`((?:[a-z]+/)+(?:\w+\.\w+)?)`", text))

    assert named
    assert {name for name in named if not (ROOT / name).exists()} == set()


@pytest.fixture
def example() -> str:
    """Return deploy/bookmender.toml with every commented default uncommented."""
    text = (ROOT / "deploy" / "bookmender.toml").read_text()
    return re.sub(r"^#(?=\w+ = )", "", text, flags=re.MULTILINE)


def test_the_example_names_every_setting(example: str) -> None:
    def keys(settings: dict[str, Any]) -> set[str]:
        nested = {key: value for key, value in settings.items() if isinstance(value, dict)}
        return set(settings) | {f"{key}.{name}" for key in nested for name in nested[key]}

    settings = Settings(metadata_service_uri="zk://127.0.0.1:2181/ledgers")

    assert keys(tomllib.loads(example)) == keys(dataclasses.asdict(settings))


def test_the_example_comments_show_the_defaults(example: str, tmp_path: Path) -> None:
    path = tmp_path / "bookmender.toml"
    path.write_text(example)

    settings = load_settings(path, environment={})

    node = NodeSettings(state_dir=settings.node.state_dir)
    assert settings == Settings(metadata_service_uri=settings.metadata_service_uri, node=node)


def test_the_example_has_the_state_folder_of_the_unit(example: str) -> None:
    """`ledger restore`, run by hand, does not have systemd's STATE_DIRECTORY."""
    unit = (ROOT / "deploy" / "bookmender.service").read_text()
    (name,) = re.findall(r"^StateDirectory=(\w+)$", unit, flags=re.MULTILINE)

    assert tomllib.loads(example)["node"]["state_dir"] == f"/var/lib/{name}"


def test_the_unit_permits_setpriority() -> None:
    """setpriority is one of systemd's @resources; a denied system call kills the daemon."""
    unit = (ROOT / "deploy" / "bookmender.service").read_text()
    denied = re.findall(r"^SystemCallFilter=~(.*)$", unit, flags=re.MULTILINE)

    assert NodeSettings().nice
    assert denied == ["@privileged"]


def test_the_example_environment_is_accepted() -> None:
    text = (ROOT / "deploy" / "bookmender.env").read_text()
    variables = dict(re.findall(r"^#(\w+)=(.*)$", text, flags=re.MULTILINE))

    settings = load_settings(None, environment=variables)

    assert settings.metadata_service_uri == variables["BOOKMENDER_METADATA_SERVICE_URI"]


def test_the_command_has_help() -> None:
    command = subprocess.run(
        [sys.executable, "-m", "daemon", "--help"],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert command.returncode == 0, command.stderr
    assert re.search(r"^\s+local\s+\S", command.stdout, flags=re.MULTILINE), command.stdout


def test_every_error_event_is_documented() -> None:
    page = (ROOT / "docs" / "log-events.md").read_text()
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]

    assert {event for row in rows for event in re.findall(r"`([a-z_.]+)`", row)} == errors_logged()


def test_the_daemon_does_not_import_packages_of_fsck() -> None:
    """PySpark, pyarrow, pandas and numpy are optional, and slow to import."""
    code = (
        "import sys, daemon.cli.daemon, daemon.cli.status\n"
        "print(*{'pyspark', 'pyarrow', 'pandas', 'numpy'} & sys.modules.keys())"
    )

    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert ended.stdout.split() == []
