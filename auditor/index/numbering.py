"""A small number for each of many equal values."""

from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class Numbering(Generic[T]):
    """Numbers from 0 in the order in which values are first seen. No value is ever forgotten."""

    def __init__(self) -> None:
        self.values: list[T] = []
        """By number."""
        self._numbers: dict[T, int] = {}

    def number(self, value: T) -> int:
        """The value's, a new one if it has none yet."""
        number = self._numbers.setdefault(value, len(self.values))
        if number == len(self.values):
            self.values.append(value)
        return number

    def find(self, value: T) -> int | None:
        return self._numbers.get(value)
