"""``bookmender config``: shows the effective settings, checks them, and imports Java's."""

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from daemon.answers import as_json
from daemon.cli.main import EXIT_FAILED, CommandGroup, cluster_options
from daemon.cli.output import echo_list, list_options
from daemon.cli.paths import ReadableFile
from daemon.conflicts import conflicts, exposed_secrets
from daemon.http.access import read_token
from daemon.http.tls import ServerTls
from daemon.java_settings import read_properties, to_toml, translate
from daemon.placement import check_rack_sources
from daemon.settings import (
    RETIRED,
    load_settings,
    setting_keys,
    setting_value,
)
from daemon.settings_source import LOCAL_CLUSTER, find_source
from daemon.words import counted
from ledgers.errors import SettingsError
from ledgers.secret import Secret
from ledgers.security import security_for

VARIABLE = "environment variable "
"""How the source of a setting from the environment begins (``daemon.settings``)."""


@click.group(cls=CommandGroup)
def config() -> None:
    """Show, check or import settings.

    \b
      bookmender config show                     each setting and where it comes from
      bookmender config check -c FILE            errors, and settings that fight each other
      bookmender config import bk_server.conf    Java's settings as TOML
    """


@config.command("show")
@list_options
@click.option("--changed", is_flag=True, help="Only settings that are not defaults.")
def show(config: Path | None, output: str, changed: bool) -> None:
    """Show the settings and their sources.

    A source is the default, the file, or an environment variable. Secrets are not shown. The text
    is a valid settings file, unless it hides a secret.
    """
    settings, sources = find_source(config, os.environ).load_with_sources()
    rows = [
        _shown(key, setting_value(settings, key), sources.get(key, ""))
        for key in setting_keys()
        if key in sources or not changed
    ]
    echo_list(output, {"settings": rows}, rows="settings", text=lambda: "\n".join(_as_toml(rows)))


def _shown(key: str, value: Any, source: str) -> dict[str, Any]:
    """Return one setting as in the JSON. ``source``: the file, the variable or the local cluster;
    empty: a default."""
    kind = "file" if source else "default"
    if source.startswith((VARIABLE, LOCAL_CLUSTER)):
        kind = "environment" if source.startswith(VARIABLE) else "local cluster"
    return {
        "setting": key,
        "value": str(value) if isinstance(value, Secret) else value,  # secrets are hidden
        "source": kind,
        "where": source.removeprefix(VARIABLE).removeprefix(LOCAL_CLUSTER) or None,
    }


def _as_toml(rows: list[dict[str, Any]]) -> Iterator[str]:
    section = ""
    for row in rows:
        table, _, name = row["setting"].rpartition(".")
        if table != section:
            section = table
            yield f"\n[{section}]"
        assignment = f"{name} = {json.dumps(row['value'], ensure_ascii=False)}"
        where = row["where"] or "default"
        kind = {"environment": VARIABLE, "local cluster": LOCAL_CLUSTER}.get(row["source"], "")
        yield f"{assignment:<44} # {kind}{where}"


@config.command("check")
@cluster_options
def check(config: Path | None, output: str) -> None:
    """Check the settings, without any server.

    It finds wrong values, settings that fight each other, and those that have no effect any more.
    It reads the files that the settings name, so run it as the user of the service.
    bookmender doctor checks the cluster, too.

    Exit codes: 0 nothing was found. 1 some settings fight each other, or a secret is exposed. 2 a
    value is wrong, or a file that the settings name is missing or unusable.
    """
    source = find_source(config, os.environ)
    settings, sources = source.load_with_sources()
    check_rack_sources(settings.placement)
    security_for(settings.security).check()
    if settings.http.token_file:
        read_token(settings.http.token_file)
    ServerTls(settings.http).context()
    found = [*conflicts(settings), *exposed_secrets(settings, source.file)]
    retired = sorted(RETIRED & sources.keys())
    if output == "json":
        told = [
            {"settings": [*each.keys], "text": each.text, "advice": each.advice} for each in found
        ]
        click.echo(as_json({"conflicts": told, "retired": retired}))
    else:
        for key in retired:
            click.echo(f"{key} ({sources[key]}): has no effect any more; CHANGELOG.md says why")
        for each in found:
            click.echo(f"{', '.join(each.keys)}: {each.text}. {each.advice}")
        click.echo(f"the settings are valid; {counted(len(found), 'conflict')}")
    sys.exit(EXIT_FAILED if found else 0)


@config.command("import")
@click.argument("java_file", metavar="FILE", type=ReadableFile())
def import_java(java_file: Path) -> None:
    """Translate Java's bk_server.conf to TOML.

    \b
      bookmender config import bk_server.conf > bookmender.toml

    The file is read as Java reads it: of several lines with one name the first counts. Values with
    variables are left out and listed. Comments list the settings without a counterpart, and what to
    do instead. Secrets are not copied. Settings of the bookie itself are only listed.

    Exit codes: 0 translated. 1 some values are not understood, or use a variable, or another
    setting is needed. 2 the file names no cluster, or includes another file.
    """
    imported = translate(read_properties(java_file))
    document = to_toml(imported)
    click.echo(document)
    lacking = _errors_of(document)
    if lacking:
        click.echo(lacking, err=True)
    sys.exit(EXIT_FAILED if imported.wrong or lacking else 0)


def _errors_of(document: str) -> str:
    """Return why this settings file would be refused; empty if it is valid."""
    with tempfile.TemporaryDirectory(prefix="bookmender-config-") as folder:
        path = Path(folder) / "bookmender.toml"
        path.write_text(document, "utf-8")
        try:
            load_settings(path, {})
        except SettingsError as error:
            return str(error).replace(f"{path}: ", "")
    return ""
