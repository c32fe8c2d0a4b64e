"""Where the settings of a command come from, and reading them.

The first of these files is read: the one of ``-c``, of BOOKMENDER_CONFIG, of this user, of this
host. The environment overrides it. Without a file and an address in the environment, a running
cluster of ``bookmender local`` is used.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from daemon.home import is_readable
from daemon.local import folder
from daemon.local.security import settings_file
from daemon.local.spec import ClusterSpec
from daemon.settings import (
    CONFIG_VARIABLE,
    AddressMissingError,
    Settings,
    load_settings_and_sources,
    variable_of,
)
from ledgers.errors import SettingsError

HOST_FILE = Path("/etc/bookmender/bookmender.toml")
URI = "metadata_service_uri"
LOCAL_CLUSTER = "local cluster "
"""How the source of the address of a local cluster begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingsSource:
    """``environment`` overrides the ``file``. ``local_cluster``: the folder of the local cluster
    that is used, as nothing names another. ``searched``: files that do not exist."""

    file: Path | None
    environment: Mapping[str, str]
    local_cluster: Path | None = None
    searched: tuple[Path, ...] = ()

    def load(self) -> Settings:
        """Read the settings. Raises SettingsError as ``daemon.settings.load_settings`` does."""
        return self.load_with_sources()[0]

    def load_with_sources(self) -> tuple[Settings, Mapping[str, str]]:
        """Read the settings, and the source of each that is not a default. Raises SettingsError."""
        try:
            settings, sources = load_settings_and_sources(self.file, self.environment)
        except AddressMissingError as error:
            where = f"{self.file} was read"
            if self.file is None:
                places = " or ".join(map(str, self.searched))
                where = f"There is no file {places}, and no local cluster runs"
            raise SettingsError(f"{error}. {where}", setting=URI) from error
        if self.local_cluster and self.file is None:
            sources = {**sources, URI: f"{LOCAL_CLUSTER}{self.local_cluster}"}
        return settings, sources


def find_source(given: Path | None, environment: Mapping[str, str]) -> SettingsSource:
    """Find the settings. ``given``: the file of ``-c``. Raises SettingsError for a file that this
    user may not read: without its settings a command would do something else."""
    if given is not None:
        return SettingsSource(file=given, environment=environment)
    if named := environment.get(CONFIG_VARIABLE):
        if not is_readable(Path(named)):
            raise SettingsError(f"{CONFIG_VARIABLE} is {named}: there is no such file")
        return SettingsSource(file=Path(named), environment=environment)
    searched = (*_file_of_user(environment), HOST_FILE)
    if file := next(filter(is_readable, searched), None):
        return SettingsSource(file=file, environment=environment)
    if variable_of(URI) not in environment and (found := _running_local_cluster()):
        data, spec = found
        if (secured := settings_file(data, spec)) is None:
            environment = {**environment, variable_of(URI): spec.metadata_service_uri}
        return SettingsSource(file=secured, environment=environment, local_cluster=data)
    return SettingsSource(file=None, environment=environment, searched=searched)


def _file_of_user(environment: Mapping[str, str]) -> tuple[Path, ...]:
    base = environment.get("XDG_CONFIG_HOME")
    if not base and (home := environment.get("HOME")):
        base = f"{home}/.config"
    return (Path(base) / "bookmender" / HOST_FILE.name,) if base else ()


def _running_local_cluster() -> tuple[Path, ClusterSpec] | None:
    try:
        data = folder.default_data().resolve()
        spec = ClusterSpec.load(data) if folder.is_in_use(data) else None
    except SettingsError:  # no home folder, or the folder of another release
        return None
    return (data, spec) if spec else None
