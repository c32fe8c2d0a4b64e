"""Which long tests a change needs: the table .ci/long, and what .ci/groups makes of it."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CI = ROOT / ".ci"
ROWS = [line.split() for line in (CI / "long").read_text().splitlines() if line and line[0] != "#"]


def git(folder: Path, *arguments: str) -> str:
    options = ("-c", "user.name=t", "-c", "user.email=t@localhost")
    command = ["git", "-C", str(folder), *options, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_the_table_has_the_groups_of_the_markers() -> None:
    marked = {
        group
        for file in (ROOT / "tests").rglob("test_*.py")
        for group in re.findall(r'mark\.long\(group="(\w+)"\)', file.read_text())
    }

    assert {group for group, _ in ROWS} == {"all", *marked}


@pytest.mark.parametrize(("group", "paths"), ROWS, ids=str)
def test_each_part_of_a_row_is_a_path_of_the_tree(group: str, paths: str) -> None:
    files = git(ROOT, "ls-files", "--cached", "--others", "--exclude-standard").splitlines()

    assert [path for path in files if re.search(paths, path)], f"{group} would never run"


def test_each_file_of_the_product_needs_a_group() -> None:
    packages = ("ledgers", "replication", "auditor", "checkpoints", "daemon")
    files = git(ROOT, "ls-files", "--", *(f"{package}/*.py" for package in packages)).splitlines()

    assert [file for file in files if not any(re.search(paths, file) for _, paths in ROWS)] == []


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return a repository with the script, the table and one commit, whose tag is ``base``."""
    (tmp_path / ".ci").mkdir()
    for name in ("groups", "long"):
        shutil.copy(CI / name, tmp_path / ".ci" / name)
    git(tmp_path, "init", "--quiet", "--initial-branch=main")
    commit(tmp_path, "README.md")
    git(tmp_path, "tag", "base")
    return tmp_path


def commit(tree: Path, file: str, content: str = "") -> None:
    path = tree / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    git(tree, "add", "--all")
    git(tree, "commit", "--quiet", "--message", file)


def groups(tree: Path, base: str = "base") -> list[str]:
    script = [str(tree / ".ci" / "groups")]
    done = subprocess.run(script, env={"BASE": base}, check=True, capture_output=True, text=True)
    return done.stdout.split()


@pytest.mark.parametrize(
    ("file", "content", "expected"),
    [
        pytest.param("docs/faq.md", "", ["commands"], id="a document"),
        pytest.param("tests/replication/test_plan.py", "", [], id="a test without servers"),
        pytest.param("checkpoints/log.py", "", ["feed", "fsck"], id="a package"),
        pytest.param("tests/forked.py", "", ["all"], id="what tests share"),
        pytest.param(
            "tests/cluster/test_x.py",
            '@pytest.mark.long(group="audit")\n    marks=pytest.mark.long(group="http")\n',
            ["audit", "http"],
            id="a file with long tests",
        ),
    ],
)
def test_a_change_needs_the_groups_of_its_paths(
    tree: Path, file: str, content: str, expected: list[str]
) -> None:
    commit(tree, file, content)

    assert groups(tree) == expected


def test_what_is_unknown_or_merged_needs_all(tree: Path) -> None:
    unknown, unchanged = groups(tree, "no-such-commit"), groups(tree)
    git(tree, "switch", "--quiet", "--create", "side")
    commit(tree, "docs/a.md")
    git(tree, "switch", "--quiet", "main")
    commit(tree, "docs/b.md")
    elsewhere = groups(tree, "side")
    git(tree, "merge", "--quiet", "--no-edit", "side")

    assert unknown == unchanged == elsewhere == groups(tree) == ["all"]
