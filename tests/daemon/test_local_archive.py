"""The class archive of a bookie: recorded by one JVM, used by later ones."""

from pathlib import Path

import pytest

from daemon.local.jars import archive_flags, archive_path, keep_archive
from daemon.local.java import Java


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    (tmp_path / "jars").mkdir()
    java = Java(executable=Path("java"), major=17, version="17.0.15")
    return archive_path(tmp_path / "jars", java)


def test_an_existing_archive_is_used(archive: Path, tmp_path: Path) -> None:
    archive.touch()

    assert archive_flags(archive, draft=tmp_path / "draft") == (f"-XX:SharedArchiveFile={archive}",)


def test_without_an_archive_a_jvm_with_a_draft_path_records_one(
    archive: Path, tmp_path: Path
) -> None:
    assert f"-XX:ArchiveClassesAtExit={tmp_path}/draft" in archive_flags(
        archive, draft=tmp_path / "draft"
    )
    assert archive_flags(archive, draft=None) == ()


def test_a_draft_becomes_the_archive(archive: Path, tmp_path: Path) -> None:
    draft = tmp_path / "draft"
    draft.write_text("classes")

    keep_archive(draft, archive)

    assert archive.read_text() == "classes"
    assert not draft.exists()
    assert list(archive.parent.iterdir()) == [archive]


def test_without_a_draft_the_archive_stays(archive: Path, tmp_path: Path) -> None:
    archive.write_text("classes")

    keep_archive(tmp_path / "draft", archive)

    assert archive.read_text() == "classes"


def test_another_java_has_another_archive(archive: Path) -> None:
    java = Java(executable=Path("java"), major=17, version="17.0.16")

    assert archive_path(archive.parent, java) != archive
