"""The text of ``deploy/bookmender.toml``: every setting with its default, from the docstrings of
the settings. ``make docs`` writes it together with ``docs/settings.md`` (``pages``)."""

import ast
import inspect
import json
import textwrap
from dataclasses import fields, is_dataclass
from typing import Any, cast, get_type_hints

from daemon.settings import Settings
from ledgers.secret import Secret

WIDTH = 120
EXAMPLES = {
    "metadata_service_uri": "zk+hierarchical://127.0.0.1:2181/ledgers",
    "node.state_dir": "/var/lib/bookmender",
}
"""The settings that are not comments: the first is required, and the second is the state directory
of bookmender.service."""

HEAD = """\
# Settings of bookmender, written by `make docs` from the docstrings of the settings. Each commented
# setting shows its default; only metadata_service_uri is required. After a change: systemctl reload
# bookmender; the log names settings that need a restart (docs/settings.md lists them). Names that
# end in _s are times in seconds, except rates such as bytes_per_s. The environment overrides this
# file: BOOKMENDER_REPLICATION_TARGET=local.
"""


def settings_file(_: str = "") -> str:
    """Return the file, in TOML."""
    lines = [HEAD]
    for name, kind in get_type_hints(Settings).items():
        if not is_dataclass(kind):
            lines += _setting(name, None, docstrings(Settings)[name])
            continue
        lines += ["", f"[{name}]"]
        if about := section_about(name, cast(type, kind)):
            lines += [*_comment(about), ""]
        texts = docstrings(cast(type, kind))
        for each in fields(kind):
            lines += _setting(f"{name}.{each.name}", each.default, texts[each.name])
    return "\n".join(lines) + "\n"


def _setting(key: str, default: object, text: str) -> list[str]:
    name = key.rpartition(".")[2]
    if key in EXAMPLES:
        return [*_comment(text), f"{name} = {toml(EXAMPLES[key])}"]
    return [*_comment(text), f"#{name} = {toml(default)}"]


def _comment(text: str) -> list[str]:
    plain = text.replace("``", "").replace("True: ", "true: ").replace("False: ", "false: ")
    return textwrap.wrap(
        plain, WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False
    )


def toml(value: object) -> str:
    """Return a default as TOML writes it."""
    return json.dumps(str(value) if isinstance(value, Secret) else value)


def section_about(name: str, kind: type[Any]) -> str:
    """Return what the docstring of a section says about it."""
    about = " ".join(inspect.cleandoc(kind.__doc__ or "").split())
    about = about.removeprefix(f"The section ``[{name}]``").lstrip(".: ")
    return about[:1].upper() + about[1:]


def docstrings(kind: type[Any]) -> dict[str, str]:
    """Return the docstring below each field of a dataclass; empty if a field has none."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(definition, ast.ClassDef)
    texts: dict[str, str] = {}
    last = ""
    for node in definition.body:
        match node:
            case ast.AnnAssign(target=ast.Name(id=name)):
                last = name
                texts[last] = ""
            case ast.Expr(value=ast.Constant(value=str(text))) if last:
                texts[last] = " ".join(text.split())
            case _:
                last = ""
    return texts
