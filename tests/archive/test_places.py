"""Each place of an archive keeps the contract of ``Place``; and the URLs of places."""

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from archive.places import Directory, Place, TakenError, open_place
from ledgers.errors import SettingsError, UnavailableError
from tests.archive.places import MemoryPlace, S3Server


@pytest.fixture(params=["directory", "memory", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """All must pass every test that uses this fixture; an archive relies on nothing else."""
    made: Place
    match request.param:
        case "directory":
            made = Directory(tmp_path / "archive")
        case "memory":
            made = MemoryPlace()
        case _:
            made = open_place(request.getfixturevalue("s3").new_url())
    made.prepare()
    return made


def test_a_new_place_is_empty(place: Place) -> None:
    assert place.names() == []
    assert place.read("one") is None


def test_a_file_is_created_once(place: Place) -> None:
    place.create("one", b"1")

    with pytest.raises(TakenError):
        place.create("one", b"2")
    assert place.read("one") == b"1"


def test_a_file_is_replaced(place: Place) -> None:
    place.replace("latest", b"a")
    place.replace("latest", b"b")

    assert place.names() == ["latest"]
    assert place.read("latest") == b"b"


def test_a_deleted_file_is_gone_and_may_be_deleted_again(place: Place) -> None:
    place.create("one", b"1")

    place.delete("one")
    place.delete("one")

    assert place.read("one") is None
    place.create("one", b"2")


# --- Directories ----------------------------------------------------------------------------------


def test_only_the_service_user_reads_a_file(tmp_path: Path) -> None:
    place = Directory(tmp_path)

    place.create("one", b"1")

    assert (tmp_path / "one").stat().st_mode & 0o777 == 0o600


def test_a_directory_that_is_gone_is_not_created_again(tmp_path: Path) -> None:
    """It may be a mount point."""
    place = Directory(tmp_path / "archive")

    assert place.names() == []
    with pytest.raises(UnavailableError, match=r"No such file.* mount the folder"):
        place.create("one", b"1")


def test_of_writers_at_once_one_creates_the_file(tmp_path: Path) -> None:
    place = Directory(tmp_path)

    def creates(data: bytes) -> bool:
        try:
            place.create("one", data)
        except TakenError:
            return False
        return True

    texts = [b"%d" % i for i in range(8)]
    with ThreadPoolExecutor(len(texts)) as pool:
        winners = [text for text, wins in zip(texts, pool.map(creates, texts), strict=True) if wins]

    assert [place.read("one")] == winners


@pytest.mark.parametrize("write", [Directory.create, Directory.replace])
def test_a_full_disk_leaves_no_half_file(
    write: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert callable(write)
    place = Directory(tmp_path)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)  # some file systems only say it here
    with pytest.raises(UnavailableError, match=r"No space left.* Free space there"):
        write(place, "one", b"1")

    assert os.listdir(tmp_path) == []


# --- S3 -------------------------------------------------------------------------------------------


def test_all_names_are_listed(s3: S3Server) -> None:
    """S3 gives a thousand names at a time."""
    url, names = s3.new_url(), {f"{i:012d}.bma" for i in range(2_005)}
    s3.fill(url, names)

    assert set(open_place(url).names()) == names


def test_a_missing_bucket_is_no_empty_archive(s3: S3Server) -> None:
    place = open_place("s3://missing/archive")

    for call in (place.names, lambda: place.read("one"), lambda: place.create("one", b"")):
        with pytest.raises(UnavailableError, match=r"bucket does not exist.* create the bucket"):
            call()


def test_a_store_without_conditional_writes_is_refused(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = open_place(s3.new_url())
    monkeypatch.setattr(place, "create", place.replace)

    with pytest.raises(UnavailableError, match="lets a second writer replace a file"):
        place.prepare()

    assert place.names() == []


def test_missing_credentials_are_named(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    url = s3.new_url()
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")

    with pytest.raises(UnavailableError, match=r"locate credentials.* in its environment"):
        open_place(url).names()


def test_refused_credentials_are_not_printed(s3: S3Server) -> None:
    url = s3.new_url()

    with s3.refusing(), pytest.raises(UnavailableError, match="in its environment") as caught:
        open_place(url).names()

    said = f"{caught.value} {caught.value.__notes__} {caught.value.__cause__}"
    assert s3.SECRET not in said


def test_a_server_that_is_gone_is_named() -> None:
    with S3Server() as server:
        place = open_place(server.new_url())
        place.create("one", b"1")
    with pytest.raises(UnavailableError, match=r"[Cc]onnect.* reaches the place"):
        place.create("two", b"2")


# --- URLs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("file://host/path", "no absolute path"),
        ("file:///path?x=1", "names no folder"),
        ("file:///", "names no folder"),
        ("s3://key:secret@bucket/path", "s3: URL has credentials"),
        ("az://box/path?sig=secret", "az: URL has credentials"),
        ("zk+flat://zk1:2181/ledgers", "cannot be in the cluster"),
        ("http://host/path", "no place for an archive"),
        ("/path", "no place for an archive"),
    ],
)
def test_a_wrong_url_is_refused(url: str, told: str) -> None:
    with pytest.raises(SettingsError, match=told) as caught:
        open_place(url)
    assert "secret" not in str(caught.value)
