"""A place in memory, which can fail, and a call that does not need a thread."""

from collections.abc import Callable
from typing import TypeVar

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


async def at_once(call: Callable[[], T], /) -> T:
    return call()
