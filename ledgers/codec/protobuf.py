"""Reads and writes the protobuf messages in znodes, binary and text.

Reading is strict. Text is written byte for byte as Java writes it, because Java nodes read and
rewrite metadata version 2, marks, locks and votes. The Python printer of protobuf escapes other
bytes than Java's, so this module has its own printer.
"""

import re
from collections.abc import Iterator
from typing import Any, TypeVar

from google.protobuf import text_format
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from ledgers.errors import CorruptionError

_Message = TypeVar("_Message", bound=Message)


def parse_binary(data: bytes, message_class: type[_Message]) -> _Message:
    """Parse a message. Raises CorruptionError, also if a required field is missing. Strings are not
    checked: pass those that matter to ``decoded``."""
    try:
        message = message_class.FromString(data)
    except DecodeError as error:
        raise CorruptionError(f"not the bytes of a {message_class.__name__}") from error
    return _complete(message)


def decoded(value: str) -> str:
    """Return a string of a parsed message. Raises CorruptionError if it is not UTF-8: protobuf's C
    implementation then returns bytes, because proto2 does not forbid them."""
    if not isinstance(value, str):
        raise CorruptionError("a string that is not UTF-8", value=value[:200])
    return value


def parse_text(data: bytes, message_class: type[_Message]) -> _Message:
    """Parse a message in text form. Raises CorruptionError, also for missing fields, and for
    unknown ones, as Java before 4.18: a rewrite could not preserve them."""
    message, name = message_class(), message_class.__name__
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CorruptionError(f"text of a {name} that is not UTF-8") from error
    if _WRONG_ESCAPE.search(text):
        raise CorruptionError(f"text of a {name} with a wrong escape")
    # Protobuf's parser needs quadratic time for a run of backslashes: minutes for 200 KB.
    text = text.replace("\\\\", "\\134")
    try:
        # Merge, because in Java the last of several values wins too.
        text_format.Merge(text, message)
    except text_format.ParseError as error:
        # Without the cause, whose message quotes the line, which may contain a ledger's password.
        raise CorruptionError(
            f"not the text of a {name}", line=error.GetLine(), column=error.GetColumn()
        ) from None
    return _complete(message)


# protobuf's Python parser accepts a wrong escape literally. Java's parser rejects the text.
_WRONG_ESCAPE = re.compile(
    r"""(?<!\\)(?:\\\\)*\\(?![abfnrtv\\'"]|[0-3]|[4-7][0-7]?(?![0-7])|x[0-9A-Fa-f])"""
)


def _complete(message: _Message) -> _Message:
    if not message.IsInitialized():
        untyped: Any = message  # its stubs lack the method
        missing = ", ".join(untyped.FindInitializationErrors())
        raise CorruptionError(f"a {type(message).__name__} lacks {missing}")
    return message


def format_text(message: Message) -> bytes:
    """Return the message as text: a line for each field, by number, nested messages indented."""
    return "".join(_text_lines(message, "")).encode("ascii")


def _text_lines(message: Message, indent: str) -> Iterator[str]:
    for field, value in message.ListFields():
        for each in value if field.is_repeated else (value,):
            if field.type == FieldDescriptor.TYPE_MESSAGE:
                yield f"{indent}{field.name} {{\n"
                yield from _text_lines(each, indent + "  ")
                yield f"{indent}}}\n"
            else:
                yield f"{indent}{field.name}: {_scalar(field, each)}\n"


def _scalar(field: FieldDescriptor, value: int | str | bytes) -> str:
    if isinstance(value, str):
        value = value.encode("utf-8")
    if isinstance(value, bytes):
        return f'"{"".join(map(_ESCAPED.__getitem__, value))}"'
    if field.enum_type is not None:
        name: str = field.enum_type.values_by_number[value].name
        return name
    return str(value)


def _escaped(byte: int) -> str:
    """Return the escape of protobuf-java 4. Older ones wrote 7 and 11 as ``\\a`` and ``\\v``."""
    short = {8: "\\b", 9: "\\t", 10: "\\n", 12: "\\f", 13: "\\r", 34: '\\"', 39: "\\'", 92: "\\\\"}
    if byte in short:
        return short[byte]
    return chr(byte) if 32 <= byte < 127 else f"\\{byte:03o}"


_ESCAPED = tuple(map(_escaped, range(256)))
