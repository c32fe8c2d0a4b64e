"""``Secret``: a password or token that is never shown.

``repr``, ``str`` and format strings show a placeholder, so that logs, errors and tracebacks do. A
serializer such as JSON refuses the type. Pickle keeps the value, because Spark sends settings to
executors.
"""

from typing import AnyStr, Generic

HIDDEN = "(hidden)"


class Secret(Generic[AnyStr]):
    """A secret text, or secret bytes. Immutable. False if it is empty."""

    __slots__ = ("_value",)

    def __init__(self, value: AnyStr) -> None:
        self._value: AnyStr = value

    def reveal(self) -> AnyStr:
        """Return the secret itself, for the one use that needs it."""
        return self._value

    def __str__(self) -> str:
        return HIDDEN if self._value else ""

    def __repr__(self) -> str:
        return f"Secret({self})"

    def __bool__(self) -> bool:
        return bool(self._value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and self._value == other._value

    def __hash__(self) -> int:
        return hash(self._value)
