"""Files in folders that another user may write to: no link is followed."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ledgers.plain_files import plain, refuse_links, replace_file


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    path = tmp_path / "victim"
    path.write_text("precious")
    return path


@pytest.mark.parametrize("mode", ["wb", "ab", "a+"])
@pytest.mark.parametrize("link", [os.symlink, os.link, lambda _, path: os.mkfifo(path)])
def test_neither_a_link_nor_a_pipe_is_opened(
    victim: Path, tmp_path: Path, mode: str, link: Callable[[Path, Path], None]
) -> None:
    link(victim, tmp_path / "log")

    with pytest.raises(OSError), open(tmp_path / "log", mode, opener=plain):  # noqa: PT011
        pass

    assert victim.read_text() == "precious"


def test_a_plain_file_is_opened_as_its_mode_says(victim: Path) -> None:
    with open(victim, "a", opener=plain) as file:
        file.write("!")
    assert victim.read_text() == "precious!"

    with open(victim, "w", opener=plain):
        pass
    assert victim.read_text() == ""


def test_a_file_replaces_a_link_and_the_link_in_the_place_of_its_draft(
    victim: Path, tmp_path: Path
) -> None:
    for name in ("summary.json", ".summary.json.new"):
        (tmp_path / name).symlink_to(victim)

    replace_file(tmp_path / "summary.json", "{}")

    assert victim.read_text() == "precious"
    assert (tmp_path / "summary.json").read_text() == "{}"
    assert not (tmp_path / "summary.json").is_symlink()


@pytest.mark.parametrize(("mode", "is_refused"), [(0o755, False), (0o777, True), (0o1777, True)])
def test_a_link_is_refused_where_others_may_write(
    tmp_path: Path, mode: int, is_refused: bool
) -> None:
    folder = tmp_path / "results"
    folder.mkdir()
    folder.chmod(mode)
    (folder / "state").symlink_to(tmp_path)

    if is_refused:
        with pytest.raises(OSError, match="delete it"):
            refuse_links(folder)
    else:
        refuse_links(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a link to another user")
def test_a_link_of_another_user_is_refused_everywhere(tmp_path: Path) -> None:
    (tmp_path / "state").symlink_to(tmp_path)
    os.lchown(tmp_path / "state", 12_345, -1)

    with pytest.raises(OSError, match="delete it"):
        refuse_links(tmp_path)


def test_a_file_is_synced_before_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "options.json"
    stood: list[bool] = []
    monkeypatch.setattr(os, "fsync", lambda _: stood.append(path.exists()))

    replace_file(path, "{}")

    assert stood == [False]
    assert [each.name for each in tmp_path.iterdir()] == ["options.json"]
    assert path.read_text() == "{}"
