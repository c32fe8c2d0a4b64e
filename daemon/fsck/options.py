"""What ``bookmender fsck`` is asked for: kinds of options that its commands share, and what becomes
of them."""

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from auditor.fsck.levels import FsckOptions, Level, SessionTimeouts
from daemon.cli import note_output
from daemon.settings import Settings, load_settings
from ledgers.errors import SettingsError
from ledgers.formats.layout import MetadataUri

URI_VARIABLE = "BOOKMENDER_METADATA_SERVICE_URI"


class Folder(click.Path):
    """As an absolute path; "" is a variable that was never set, and not the folder that one happens
    to be in."""

    def __init__(self) -> None:
        super().__init__(file_okay=False, resolve_path=True, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("it is empty: name a folder, . for this one", param, ctx)
        return super().convert(value, param, ctx)


class Share(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.5 on only
    """``5%``, ``0.5%``: a share above 0, up to 1."""

    name = "percent"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        if isinstance(value, float):
            return value
        found = re.fullmatch(r"([0-9]{1,3}(?:\.[0-9]{1,6})?)%", value)
        share = float(found[1]) / 100 if found else 0.0
        if not 0 < share <= 1:
            self.fail(f"{value!r} is no share, as in 5% or 0.5%", param, ctx)
        return share


class SparkSetting(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.5 on only
    """``spark.executor.memory=2g``."""

    name = "key=value"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, str]:
        key, equals, setting = str(value).partition("=")
        if not equals or not key.startswith("spark."):
            self.fail(
                f"{value!r} is no setting of Spark's, as in spark.executor.memory=2g", param, ctx
            )
        return key, setting


class SparkMaster(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.5 on only
    """``local[4]``, ``spark://host:7077``, ``yarn``, or another cluster manager's ``scheme://…``:
    what Spark would not start for it says in words of its own, and as if something had failed."""

    name = "master"
    _masters = re.compile(
        r"local(\[(\*|[1-9][0-9]*)(, *[0-9]+)?\])?|local-cluster\[.+\]|yarn"
        r"|spark://[^/,\s]+:[0-9]+(,[^/,\s]+:[0-9]+)*|(?!spark:|local:)[a-z][a-z0-9+.-]*://\S+"
    )

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value == "":  # as of a script's variable that is not set
            self.fail("it is empty; left out, it is local[*]", param, ctx)
        if not self._masters.fullmatch(value):
            kinds = "local[4], local[*], spark://host:7077, yarn, k8s://https://host:443"
            self.fail(f"{value!r} is no master that Spark knows, as are {kinds}", param, ctx)
        return str(value)


# Not those of ``daemon.cli``: --output says where results go.
format_option = click.option(
    "-o",
    "output_format",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    is_eager=True,
    callback=note_output,
    help="For people, or for programs.",
)
json_option = click.option(
    "--json",
    "output_format",
    flag_value="json",
    is_eager=True,
    callback=note_output,
    help="The same as -o json.",
)
uri_option = click.option(
    "--metadata-service-uri",
    "uri",
    metavar="URI",
    help="As in zk+hierarchical://zk1:2181;zk2:2181/ledgers, in place of the settings'.",
)
mark_option = click.option(
    "--mark", is_flag=True, help="Mark what can be mended. Without it: say what would be marked."
)


def settings_for(
    uri: str | None, config: Path | None, environment: Mapping[str, str] = os.environ
) -> Settings:
    """Those of the other commands; ``uri`` wins. Raises SettingsError."""
    given = {}
    if uri:
        given[URI_VARIABLE] = uri
        try:
            MetadataUri.parse(uri)
        except SettingsError as error:
            raise SettingsError(f"--metadata-service-uri: {error}") from error
    return load_settings(config, {**environment, **given})


def options_for(
    settings: Settings,
    *,
    level: Level,
    share: float | None,
    entry_lists: bool,
    reads_per_s: int | None,
    bytes_per_s: int | None,
    reads_in_flight: int | None,
) -> FsckOptions:
    """Raises SettingsError."""
    options = FsckOptions(
        metadata_service_uri=settings.metadata_service_uri,
        level=level,
        entry_lists=entry_lists,
        reads_per_s=reads_per_s or 0,
        bytes_per_s=bytes_per_s or 0,
        idle_open_after_s=settings.checks.counts_as_idle_after_s,
        timeouts=SessionTimeouts(
            session_s=settings.zookeeper.session_timeout_s,
            connect_s=settings.zookeeper.connect_timeout_s,
        ),
        default_password=settings.replication.default_password,
        default_digest_type=settings.replication.default_digest_type,
    )
    if share is not None:
        options = replace(options, sample_share=share)
    if reads_in_flight is not None:
        options = replace(options, reads_in_flight_per_bookie=reads_in_flight)
    return options


def level_for(level: str | None, share: float | None) -> Level:
    chosen = Level(level) if level else Level.ENDS if share is None else Level.SAMPLE
    if share is not None and chosen is not Level.SAMPLE:
        raise click.UsageError(f"--sample goes with level sample, not {chosen.value}")
    return chosen
