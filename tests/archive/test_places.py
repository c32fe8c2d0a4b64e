"""A directory of an archive, and the URLs of places."""

from pathlib import Path

import pytest

from archive.places import Directory, TakenError, open_place
from ledgers.errors import SettingsError, UnavailableError


def test_a_file_is_created_once_and_completely(tmp_path: Path) -> None:
    place = Directory(tmp_path / "archive")
    place.prepare()

    place.create("one", b"1")
    with pytest.raises(TakenError):
        place.create("one", b"2")
    place.replace("latest", b"a")
    place.replace("latest", b"b")

    assert {name: place.read(name) for name in place.names()} == {"one": b"1", "latest": b"b"}
    assert (tmp_path / "archive" / "one").stat().st_mode & 0o777 == 0o600
    place.delete("one")
    place.delete("one")
    assert place.read("one") is None


def test_a_directory_that_is_gone_is_not_created_again(tmp_path: Path) -> None:
    """It may be a mount point."""
    place = Directory(tmp_path / "archive")

    assert place.names() == []
    with pytest.raises(UnavailableError, match="No such file"):
        place.create("one", b"1")


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("file://host/path", "no absolute path"),
        ("file:///path?x=1", "names no folder"),
        ("file:///", "names no folder"),
        ("zk+flat://zk1:2181/ledgers", "cannot be in the cluster"),
        ("http://host/path", "no place for an archive"),
        ("/path", "no place for an archive"),
    ],
)
def test_a_wrong_url_is_refused(url: str, told: str) -> None:
    with pytest.raises(SettingsError, match=told):
        open_place(url)
