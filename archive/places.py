"""Where an archive is: a directory, or an object store through fsspec.

``Place.create`` writes a file only if there is none of this name. All or nothing of it becomes
visible. So of two writers of an archive, one fails.
"""

from __future__ import annotations

import errno
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit
from uuid import uuid4

from ledgers.errors import SettingsError, UnavailableError

SCHEMES: Final = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs"}
"""Object stores, and the package that fsspec needs for each."""
PRIVATE_FILE: Final = 0o600
"""Metadata of ledgers holds their passwords."""


class TakenError(UnavailableError):
    """Another writer has written a file of this name."""


class Place(ABC):
    """The folder of an archive. Its methods block, and raise UnavailableError."""

    @abstractmethod
    def prepare(self) -> None:
        """Create the folder of a new archive, or check that an object store can hold one."""

    @abstractmethod
    def names(self) -> list[str]:
        """Return the names of all files."""

    @abstractmethod
    def read(self, name: str) -> bytes | None:
        """Return a file; None if there is none."""

    @abstractmethod
    def create(self, name: str, data: bytes) -> None:
        """Write a new file. Raises TakenError if there is one of this name."""

    @abstractmethod
    def replace(self, name: str, data: bytes) -> None:
        """Write a file, over an earlier one."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Delete a file, which may be missing."""


def open_place(url: str) -> Place:
    """Return the place of a URL: ``file:///PATH``, or ``s3://BUCKET/PATH`` and others. Raises
    SettingsError."""
    parts = urlsplit(url)
    if parts.password is not None or (parts.query and parts.scheme in SCHEMES):
        raise SettingsError(
            f"the archive's {parts.scheme}: URL has credentials or a query, which ZooKeeper and "
            "logs would show. Put credentials into the environment of each node instead"
        )
    if parts.scheme == "file":
        if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
            raise SettingsError(f"the archive's URL has no absolute path: {url}. Use file:///PATH")
        if parts.query or parts.fragment or parts.path.strip("/") == "":
            raise SettingsError(f"the archive's URL names no folder: {url}. Use file:///PATH")
        return Directory(Path(unquote(parts.path)))
    if parts.scheme in SCHEMES:
        try:
            return ObjectStore(url)
        except ImportError as error:
            raise SettingsError(
                f"archives in {parts.scheme}: need the Python package {SCHEMES[parts.scheme]}. "
                f"Install it, for example with: pip install {SCHEMES[parts.scheme]}"
            ) from error
    known = ", ".join(f"{scheme}:" for scheme in ("file", *SCHEMES))
    if parts.scheme in ("bookkeeper", "zk", "bk") or parts.scheme.startswith(("zk+", "bk+")):
        raise SettingsError(
            "an archive cannot be in the cluster: it is for the day on which the cluster's "
            f"metadata is lost. Choose one of {known}"
        )
    raise SettingsError(f"no place for an archive: {url}. Choose one of {known}")


class Directory(Place):
    """A directory of this host, or of a file system that it mounts."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def prepare(self) -> None:
        with _errors_of(self._path):
            self._path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def names(self) -> list[str]:
        with _errors_of(self._path):
            return os.listdir(self._path) if self._path.exists() else []

    def read(self, name: str) -> bytes | None:
        with _errors_of(self._path / name):
            try:
                return (self._path / name).read_bytes()
            except FileNotFoundError:
                return None

    def create(self, name: str, data: bytes) -> None:
        with _errors_of(self._path / name):
            draft = self._draft(data)
            try:
                os.link(draft, self._path / name)
            except FileExistsError as error:
                raise TakenError("another writer has written this file", name=name) from error
            finally:
                draft.unlink()
            self._sync()

    def replace(self, name: str, data: bytes) -> None:
        with _errors_of(self._path / name):
            self._draft(data).replace(self._path / name)
            self._sync()

    def delete(self, name: str) -> None:
        with _errors_of(self._path / name):
            (self._path / name).unlink(missing_ok=True)

    def _draft(self, data: bytes) -> Path:
        """Write the data to a file of another name."""
        draft = self._path / f".{uuid4().hex}.draft"
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE_FILE)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            with suppress(OSError):
                draft.unlink()
            raise
        return draft

    def _sync(self) -> None:
        descriptor = os.open(self._path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class ObjectStore(Place):
    """A folder of an object store. Its credentials come from the environment of the process."""

    def __init__(self, url: str) -> None:
        """Raises ImportError if a package is missing."""
        import fsspec

        self._files: Any
        # A cache of listings would hide the files of another writer, and one of connections would
        # keep credentials that have been corrected.
        self._files, path = fsspec.core.url_to_fs(
            url, use_listings_cache=False, skip_instance_cache=True
        )
        self._path = path.rstrip("/")

    def prepare(self) -> None:
        """Check that the store refuses a second writer: some ignore the condition of a write."""
        probe = f"probe-{uuid4().hex}"
        self.create(probe, b"")
        try:
            self.create(probe, b"")
        except TakenError:
            return
        finally:
            self.delete(probe)
        raise UnavailableError(
            "the object store lets a second writer replace a file, so two nodes could damage the "
            "archive. Use one with conditional writes (If-None-Match)",
            path=self._path,
        )

    def names(self) -> list[str]:
        with _errors_of(self._path):
            try:
                found = self._files.ls(self._path, detail=False, refresh=True)
            except FileNotFoundError as error:
                if error.__cause__ is not None:  # the store's own word: the bucket is missing
                    raise
                return []
            return [each.rpartition("/")[2] for each in found]

    def read(self, name: str) -> bytes | None:
        with _errors_of(f"{self._path}/{name}"):
            try:
                return bytes(self._files.cat_file(f"{self._path}/{name}"))
            except FileNotFoundError as error:
                if error.__cause__ is not None:
                    raise
                return None

    def create(self, name: str, data: bytes) -> None:
        with _errors_of(f"{self._path}/{name}"):
            try:
                self._files.pipe_file(f"{self._path}/{name}", data, mode="create")
            except FileExistsError as error:
                raise TakenError("another writer has written this file", name=name) from error

    def replace(self, name: str, data: bytes) -> None:
        with _errors_of(f"{self._path}/{name}"):
            self._files.pipe_file(f"{self._path}/{name}", data)

    def delete(self, name: str) -> None:
        with _errors_of(f"{self._path}/{name}"), suppress(FileNotFoundError):
            self._files.rm_file(f"{self._path}/{name}")


@contextmanager
def _errors_of(where: object) -> Iterator[None]:
    """Turn the errors of a place into UnavailableError. Packages for object stores have errors of
    their own, whose only common base is Exception."""
    try:
        yield
    except UnavailableError:
        raise
    except Exception as error:
        text = getattr(error, "strerror", None) or str(error) or type(error).__name__
        if isinstance(error, PermissionError) or "Credentials" in type(error).__name__:
            cure = "Give this process access: to the folder, or by credentials in its environment"
        elif isinstance(error, FileNotFoundError):
            cure = "Correct the URL, create the bucket, or mount the folder"
        elif getattr(error, "errno", None) == errno.ENOSPC:
            cure = "Free space there"
        else:
            cure = "Make sure that this host reaches the place"
        raise UnavailableError(
            f"the archive cannot be read or written: {text.rstrip('.')}. {cure}", path=str(where)
        ) from error
