"""A place in memory, which can fail, a server of S3, and a call that does not need a thread."""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TypeVar
from unittest.mock import patch
from uuid import uuid4

from moto import settings
from moto.s3.models import s3_backends
from moto.server import ThreadedMotoServer

from archive.places import Place, TakenError
from ledgers.errors import UnavailableError

T = TypeVar("T")


class MemoryPlace(Place):
    """``fault``: called with the method and the name of a file before each call; returns True if
    the call is to fail. A failed ``create`` may have written the file."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.fault: Callable[[str, str], bool] = lambda method, name: False

    def _fail(self, method: str, name: str) -> None:
        if self.fault(method, name):
            raise UnavailableError("the place does not answer")

    def prepare(self) -> None:
        self._fail("prepare", "")

    def names(self) -> list[str]:
        self._fail("names", "")
        return list(self.files)

    def read(self, name: str) -> bytes | None:
        self._fail("read", name)
        return self.files.get(name)

    def create(self, name: str, data: bytes) -> None:
        self._fail("create", name)
        if name in self.files:
            raise TakenError("another writer has written this file", name=name)
        self.files[name] = data
        self._fail("created", name)

    def replace(self, name: str, data: bytes) -> None:
        self._fail("replace", name)
        self.files[name] = data

    def delete(self, name: str) -> None:
        self._fail("delete", name)
        self.files.pop(name, None)


class S3Server:
    """moto's server of S3 with an empty bucket, and the environment that leads to it."""

    SECRET = "sesame"

    def __init__(self) -> None:
        self._server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
        self._stack = ExitStack()
        self._bucket = uuid4().hex

    def __enter__(self) -> "S3Server":
        self._server.start()
        self._stack.callback(self._server.stop)
        host, port = self._server.get_host_and_port()
        variables = {
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
            "AWS_ACCESS_KEY_ID": "AKIAEXAMPLE",
            "AWS_SECRET_ACCESS_KEY": self.SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_MAX_ATTEMPTS": "1",  # a server that is gone is believed soon
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": "/nowhere",
            "AWS_SHARED_CREDENTIALS_FILE": "/nowhere",
        }
        self._stack.enter_context(patch.dict(os.environ, variables))
        self._backend = s3_backends["123456789012"]["aws"]  # moto's account
        self._backend.create_bucket(self._bucket, "us-east-1")
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def new_url(self) -> str:
        """Return the URL of a folder that no other test uses."""
        return f"s3://{self._bucket}/{uuid4().hex}/archive"

    def fill(self, url: str, names: Iterable[str]) -> None:
        """Create empty files, without the requests that would take half a minute."""
        folder = url.removeprefix(f"s3://{self._bucket}/")
        for name in names:
            self._backend.put_object(self._bucket, f"{folder}/{name}", b"")

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """Refuse the credentials, for the block."""
        with patch.object(settings, "INITIAL_NO_AUTH_ACTION_COUNT", 0):
            yield


async def at_once(call: Callable[[], T], /) -> T:
    return call()
