"""Paths on this host as options and arguments. Not in ``option_types``, whose imports would delay
``--help``."""

import os
import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import click

from daemon.home import is_readable
from daemon.words import printable
from ledgers.errors import SettingsError

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(?=/)(?://([^/]*))?(.*)", re.DOTALL)
"""Scheme, host and path. As in Hadoop, # and ? belong to the path."""


def local_path(text: str) -> str:
    """Return the path that a ``file:`` URL names, or the text itself if it is no URL. Raises
    SettingsError for another URL: as a path it would name a folder ``s3a:`` here."""
    url = _URL.fullmatch(text)
    if url is None:
        return text
    scheme, host, path = url.groups()
    if scheme.lower() == "file" and host in (None, "", "localhost") and "%00" not in path:
        return unquote(path)
    raise SettingsError(
        f"{printable(text)} is a URL, but bookmender reads and writes only files of this host. "
        "Give a local or mounted path, and copy from or to other storage with its own tool, such "
        "as hadoop fs -put"
    )


class LocalPath(click.Path):
    """An option type: a path on this host, also as a ``file:`` URL."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return super().convert(self.local(value, param, ctx), param, ctx)

    def local(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the path. Fails for a URL of other storage."""
        try:
            return local_path(os.fspath(value))
        except SettingsError as error:
            self.fail(str(error), param, ctx)


class ReadableFile(LocalPath):
    """A file that exists and that this user may read."""

    def __init__(self) -> None:
        super().__init__(exists=True, dir_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        value = self.local(value, param, ctx)
        try:
            is_readable(Path(value))
        except SettingsError as error:
            self.fail(str(error), param, ctx)
        return super().convert(value, param, ctx)
