"""The settings of a node, read from a TOML file and the environment.

Setting ``x`` of section ``s`` may also be given as ``BOOKMENDER_S_X``, a top-level setting as
``BOOKMENDER_X``. The environment wins. Settings are parsed once; each part of the node receives
only its own section.

Variables that Kubernetes sets for the Services of a pod's namespace are ignored. A Service named
``bookmender``, or ``bookmender-…``, shares the prefix of our settings. The kubelet writes these
variables (``pkg/kubelet/envvars`` of Kubernetes) into every pod that keeps ``enableServiceLinks``.
Both the name and the value must have the shape that the kubelet writes, so that a mistyped setting
is still refused.
"""

import difflib
import ipaddress
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from typing import Any, cast, get_type_hints

import msgspec

from auditor.settings import AuditorSettings, ChecksSettings, HoldSettings
from ledgers.codec.layout import MetadataUri
from ledgers.codec.registration import parse_bookie_id
from ledgers.errors import CorruptionError, SettingsError
from ledgers.secret import Secret
from ledgers.security import SecuritySettings
from ledgers.typed import convert
from replication.settings import PlacementSettings, ReplicationSettings

PORT_MAX = 65_535


def service_variables(environment: Mapping[str, str], *, prefix: str) -> tuple[str, ...]:
    """Return the names below ``prefix`` that Kubernetes set, sorted."""
    return tuple(
        sorted(
            name
            for name, value in environment.items()
            if name.startswith(prefix) and is_of_service(name, value)
        )
    )


def is_of_service(name: str, value: str, *, is_setting: bool = False) -> bool:
    """Return whether Kubernetes writes such a variable, with such a value, for a Service.

    ``is_setting``: True if a setting has this name, too. A port number or an address may then be
    the operator's value, but no setting takes the URL of a Service.
    """
    return any(
        name_shape.fullmatch(name) and is_value(value)
        for name_shape, is_value in _SHAPES
        if is_value is _is_url or not is_setting
    )


def _is_url(value: str) -> bool:
    """Return whether the value has the shape of ``tcp://10.96.0.7:8080`` or
    ``udp://[fd00::7]:53``."""
    found = re.fullmatch(r"(?:tcp|udp|sctp)://(?:\[([^\]]+)\]|([^:\[\]]+)):([0-9]+)", value)
    return bool(found and _is_address(found[1] or found[2]) and _is_port(found[3]))


def _is_address(value: str) -> bool:
    try:
        ipaddress.ip_address(value)
    except ValueError:
        return False
    return True


def _is_port(value: str) -> bool:
    return bool(re.fullmatch("[0-9]{1,5}", value)) and 0 < int(value) <= PORT_MAX


def _is_protocol(value: str) -> bool:
    return value in ("tcp", "udp", "sctp")


_OF_PORT = "_PORT_[0-9]{1,5}_(?:TCP|UDP|SCTP)"
_SHAPES: tuple[tuple[re.Pattern[str], Callable[[str], bool]], ...] = tuple(
    (re.compile(f"[A-Z0-9_]+{ending}"), is_value)
    for ending, is_value in (
        # A name may fit two shapes: BOOKMENDER_SERVICE_PORT is a number for the Service
        # ``bookmender``, and a URL for the Service ``bookmender-service``.
        ("_SERVICE_HOST", _is_address),
        ("_SERVICE_PORT(?:_[A-Z0-9_]+)?", _is_port),
        (_OF_PORT, _is_url),
        (f"{_OF_PORT}_PROTO", _is_protocol),
        (f"{_OF_PORT}_PORT", _is_port),
        (f"{_OF_PORT}_ADDR", _is_address),
        ("_PORT", _is_url),
    )
)
"""The endings of the names, and the shape of the values of each ending."""

ENVIRONMENT_PREFIX = "BOOKMENDER_"
CONFIG_VARIABLE = "BOOKMENDER_CONFIG"
"""Names the settings file of commands (``daemon.settings_source``); no setting itself."""
FULL_LIST = "bookmender config show"
"""The file that describes every setting, in the repository and in source releases."""
NICE_MAX = 19


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """The section ``[node]``."""

    mode: str = "repair"
    """``repair``: find lost copies and repair them. ``observe``: write nothing to ZooKeeper, take
    no vote and no lock, and report what a node would do."""
    bookie_id: str = ""
    """The local bookie, which is preferred among equal targets. Empty: the bookie registered for
    this host, if there is exactly one."""
    state_dir: str = ""
    """Absolute path of the folder for the journal of metadata writes, and for what this node knows
    of the change feed, so that it notices a restore of ZooKeeper. Commands that write to the
    journal (repair, ledger close, ledger restore) must use the same folder. Empty: systemd's state
    directory, else ``~/.local/state/bookmender``."""
    nice: int = 10
    """CPU niceness of the process, 0 to 19 (nice(1)). 0: unchanged."""

    def __post_init__(self) -> None:
        if not 0 <= self.nice <= NICE_MAX:
            raise SettingsError.not_allowed("node.nice", self.nice, f"0 to {NICE_MAX}")
        if self.mode not in ("repair", "observe"):
            raise SettingsError.not_allowed("node.mode", self.mode, "repair, observe")
        try:
            parse_bookie_id(self.bookie_id or "none")
        except CorruptionError as error:
            allowed = "the id of a bookie, as in 10.0.0.1:3181"
            raise SettingsError.not_allowed("node.bookie_id", self.bookie_id, allowed) from error
        if self.state_dir and not Path(self.state_dir).is_absolute():
            # With a relative path ``ledger restore`` would look in another folder.
            allowed = "an absolute path, as in /var/lib/bookmender"
            raise SettingsError.not_allowed("node.state_dir", self.state_dir, allowed)


@dataclass(frozen=True, slots=True, kw_only=True)
class ZooKeeperSettings:
    """The section ``[zookeeper]``."""

    session_timeout_s: float = 10.0
    """ZooKeeper session timeout, 1 to 600. If this node is silent for longer, its locks and its
    vote are deleted."""
    connect_timeout_s: float = 15.0
    """Timeout for opening a session, over all servers, 0.5 to 600. Commands wait as long only if a
    server answers but is slow."""
    requests_per_s: int = 0
    """Maximum number of requests per second that each role of this node sends to ZooKeeper. 0:
    only ZooKeeper's latency limits them."""
    request_bytes_max: int = 1_000_000
    """Size of the largest request, in bytes. Keep it some kilobytes below the servers'
    jute.maxbuffer, which is 1,048,575 by default (Pulsar's start scripts set 10,485,760). Ledgers
    with larger metadata are not repaired."""

    def __post_init__(self) -> None:
        for key, least in (("session_timeout_s", 1.0), ("connect_timeout_s", 0.5)):
            value = getattr(self, key)
            if not least <= value <= 600:
                raise SettingsError.not_allowed(f"zookeeper.{key}", value, f"{least:g} to 600")
        if not 100_000 <= self.request_bytes_max <= 1_000_000_000:
            raise SettingsError.not_allowed(
                "zookeeper.request_bytes_max", self.request_bytes_max, "100000 to 1000000000"
            )
        if not 0 <= self.requests_per_s <= 1_000_000:
            raise SettingsError.not_allowed(
                "zookeeper.requests_per_s", self.requests_per_s, "0 to 1000000"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpSettings:
    """The section ``[http]``."""

    enabled: bool = True
    """False: the node opens no port."""
    address: str = "127.0.0.1"
    """IP address to listen on: 127.0.0.1 or ::1 for this host only, 0.0.0.0 for all IPv4 addresses
    of this host, :: for those of IPv6, too."""
    port: int = 7318
    """0: any free port, which the log event ``http.listening`` names."""
    open_reads: bool = False
    """True: everybody who reaches the port may read /api. False: only this host may (over loopback,
    not through a proxy), or a request with the token. /metrics, /healthz and /readyz are always
    open."""
    token_file: str = ""
    """Absolute path of a file with a token of at least 16 characters, which changes need
    (``Authorization: Bearer TOKEN``). Empty: only client certificates allow changes."""
    certificate_file: str = ""
    """Absolute path of the server's certificate and its chain, PEM. Empty: no TLS."""
    key_file: str = ""
    """The private key of the certificate, not encrypted. Empty: it is in ``certificate_file``."""
    client_ca_file: str = ""
    """Certificates of CAs. A client with a certificate of one of them needs no token. Empty: client
    certificates are not asked for."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= PORT_MAX:
            raise SettingsError.not_allowed("http.port", self.port, f"0 to {PORT_MAX}")
        if not _is_address(self.address):
            allowed = "an IP address, as in 127.0.0.1 or 0.0.0.0"
            raise SettingsError.not_allowed("http.address", self.address, allowed)
        for key in ("token_file", "certificate_file", "key_file", "client_ca_file"):
            if (path := getattr(self, key)) and not Path(path).is_absolute():
                allowed = "an absolute path, as in /etc/bookmender/token"
                raise SettingsError.not_allowed(f"http.{key}", path, allowed)
        for key in ("key_file", "client_ca_file"):
            if getattr(self, key) and not self.certificate_file:
                raise SettingsError(
                    f"http.{key} has no effect alone: set http.certificate_file, too",
                    setting=f"http.{key}",
                )

    @property
    def is_loopback(self) -> bool:
        """True if only this host can connect."""
        return ipaddress.ip_address(self.address).is_loopback


@dataclass(frozen=True, slots=True, kw_only=True)
class NotifySettings:
    """The section ``[notify]``: of ``bookmender notify serve``. Address, TLS and token are those of
    ``[http]``."""

    port: int = 7319
    """0: any free port, which the log event ``http.listening`` names."""
    url: str = ""
    """Where clients reach this server, as in https://stor1:7319. Empty: the name of this host
    and the port."""
    clients_max: int = 20_000
    """Further clients are turned away, and try another server."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= PORT_MAX:
            raise SettingsError.not_allowed("notify.port", self.port, f"0 to {PORT_MAX}")
        if self.url and not self.url.startswith(("http://", "https://")):
            allowed = "a URL, as in http://stor1:7319"
            raise SettingsError.not_allowed("notify.url", self.url, allowed)
        if self.clients_max < 1:
            raise SettingsError.not_allowed("notify.clients_max", self.clients_max, "1 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSettings:
    """The section ``[log]``."""

    format: str = "auto"
    """``text``, ``json``, or ``auto``: text on a terminal and JSON otherwise."""
    level: str = "info"
    """``debug``, ``info``, ``warning`` or ``error``."""

    def __post_init__(self) -> None:
        for key, allowed in (
            ("format", ("auto", "text", "json")),
            ("level", ("debug", "info", "warning", "error")),
        ):
            value = getattr(self, key)
            if value not in allowed:
                raise SettingsError.not_allowed(f"log.{key}", value, ", ".join(allowed))


class AddressMissingError(SettingsError):
    """Nothing names the cluster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All settings of a node. Only ``metadata_service_uri`` is required."""

    metadata_service_uri: str = ""
    """Address of the cluster's metadata, as BookKeeper's metadataServiceUri, for example
    ``zk+hierarchical://zk1:2181;zk2:2181/ledgers``. Without a layout after ``+`` the layout is read
    from the cluster. Pulsar's ``metadata-store:zk:HOSTS/PATH`` is accepted, too: the ledgers root
    is ``PATH/ledgers``, or ``PATH`` if it ends with ``/ledgers`` and has the cluster."""
    node: NodeSettings = field(default_factory=NodeSettings)
    zookeeper: ZooKeeperSettings = field(default_factory=ZooKeeperSettings)
    security: SecuritySettings = field(default_factory=SecuritySettings)
    auditor: AuditorSettings = field(default_factory=AuditorSettings)
    hold: HoldSettings = field(default_factory=HoldSettings)
    checks: ChecksSettings = field(default_factory=ChecksSettings)
    replication: ReplicationSettings = field(default_factory=ReplicationSettings)
    placement: PlacementSettings = field(default_factory=PlacementSettings)
    http: HttpSettings = field(default_factory=HttpSettings)
    notify: NotifySettings = field(default_factory=NotifySettings)
    log: LogSettings = field(default_factory=LogSettings)

    def __post_init__(self) -> None:
        if not self.metadata_service_uri:
            raise AddressMissingError(
                "metadata_service_uri is not set; set it in the settings file, or as "
                "BOOKMENDER_METADATA_SERVICE_URI=zk+hierarchical://127.0.0.1:2181/ledgers",
                setting="metadata_service_uri",
            )
        try:
            MetadataUri.parse(self.metadata_service_uri)
        except SettingsError as error:
            raise SettingsError(str(error), setting="metadata_service_uri") from error

    @property
    def uri(self) -> MetadataUri:
        return MetadataUri.parse(self.metadata_service_uri)


def load_settings(path: Path | None, environment: Mapping[str, str]) -> Settings:
    """Return the settings. Raises one SettingsError that names each setting that does not exist or
    has a value of another type; if there is none, the first wrong value of each section. It names
    the source, and what is allowed."""
    return load_settings_and_sources(path, environment)[0]


def load_settings_and_sources(
    path: Path | None, environment: Mapping[str, str]
) -> tuple[Settings, Mapping[str, str]]:
    """Return the settings, and the source of each setting that is not a default, by full key
    (``section.key``), the retired ones too. Raises SettingsError as ``load_settings`` does."""
    errors: list[SettingsError] = []
    given = {**_from_file(path, errors), **_from_environment(environment, errors)}
    if errors:
        raise _together(errors)
    settings = _build({key: given[key] for key in given.keys() - RETIRED})
    return settings, {key: source for key, (source, _) in given.items()}


def setting_keys() -> list[str]:
    """Return the full key of every setting, in the order of the sections."""
    return list(_types())


def secret_keys() -> frozenset[str]:
    """Return the full keys of the settings that are secrets."""
    return frozenset(key for key, kind in _types().items() if kind == Secret[str])


def setting_value(settings: Settings, key: str) -> Any:
    """Return the value of the setting with this full key."""
    section, _, name = key.rpartition(".")
    return getattr(getattr(settings, section) if section else settings, name)


RETIRED = frozenset(
    {
        "auditor.rescan_interval_s",
        "checks.overdue_after_s",
        "http.java_metrics",
        "replication.entry_lists",
    }
)
"""Settings of earlier releases. They are read and have no effect, so that a file works after an
upgrade as it is. CHANGELOG.md says what to use instead."""

_Given = dict[str, tuple[str, Any]]
"""By full key (``section.key``): the source of the setting and its converted value."""


def _together(errors: Sequence[SettingsError]) -> SettingsError:
    if len(errors) == 1:
        return errors[0]
    lines = [f"{len(errors)} settings are wrong", *map(str, errors)]
    return SettingsError("\n".join(lines), setting=errors[0].setting)


def _build(given: _Given) -> Settings:
    """Build the settings from the given values. Raises the first error of each section together,
    or that of the whole."""
    arguments: dict[str, Any] = {}
    errors: list[SettingsError] = []
    for name, kind in get_type_hints(Settings).items():
        try:
            if is_dataclass(kind):
                prefix = f"{name}."
                below = {k[len(prefix) :]: v for k, (_, v) in given.items() if k.startswith(prefix)}
                arguments[name] = cast(type, kind)(**below)
            elif name in given:
                arguments[name] = given[name][1]
        except SettingsError as error:
            errors.append(_placed(error, given))
    if errors:
        raise _together(errors)
    try:
        return Settings(**arguments)
    except SettingsError as error:
        raise _placed(error, given) from error


def _placed(error: SettingsError, given: _Given) -> SettingsError:
    """Return the error with the file or variable that the setting came from."""
    key = error.setting or ""
    if key in given:
        return SettingsError(f"{given[key][0]}: {error}", setting=key)
    section = f"{key.partition('.')[0]}."
    beside = {source for other, (source, _) in given.items() if other.startswith(section)}
    if not beside:
        return error
    message = f"{', '.join(sorted(beside))}: {error}; that is its default: set it, too"
    return SettingsError(message, setting=key)


def _from_file(path: Path | None, errors: list[SettingsError]) -> _Given:
    if path is None:
        return {}
    try:
        # Some editors write a byte order mark.
        document = tomllib.loads(path.read_text("utf-8-sig"))
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # also a number of 5,000 digits, deep nesting
        raise SettingsError(f"{path}: is not TOML: {error}") from error
    flat: dict[str, Any] = {}
    for key, value in document.items():
        if not isinstance(value, dict):
            flat[key] = value
        elif key in _tables():
            flat.update({f"{key}.{name}": inner for name, inner in value.items()})
        else:  # one error for the table
            hint = _hint(f"[{key.lower()}]", [f"[{name}]" for name in _tables()])
            errors.append(SettingsError(f"{path}: there is no table [{key}]{hint}"))
    given: _Given = {}
    for key, value in flat.items():
        if key in RETIRED:
            given[key] = (str(path), value)
            continue
        try:
            given[key] = (str(path), _convert(str(path), key, value, is_text=False))
        except SettingsError as error:
            errors.append(error)
    return given


def _from_environment(environment: Mapping[str, str], errors: list[SettingsError]) -> _Given:
    names = {variable_of(key): key for key in _types()}
    retired = {variable_of(key): key for key in RETIRED}
    given: _Given = {}
    for name, value in environment.items():
        if not name.startswith(ENVIRONMENT_PREFIX):
            continue
        # Nothing is logged here, because logging is configured by the settings. Until then a log
        # line would go to standard output, into the JSON of a command.
        if name == CONFIG_VARIABLE or is_of_service(name, value, is_setting=name in names):
            continue
        if name in retired:
            given[retired[name]] = (f"environment variable {name}", value)
            continue
        if name not in names:
            hint = _hint(name, names, prefix=ENVIRONMENT_PREFIX)
            errors.append(SettingsError(f"environment: there is no setting {name}{hint}"))
            continue
        source = f"environment variable {name}"
        try:
            given[names[name]] = (source, _convert(source, names[name], value, is_text=True))
        except SettingsError as error:
            errors.append(error)
    return given


def variable_of(key: str) -> str:
    """Return the environment variable of the setting with this full key."""
    return ENVIRONMENT_PREFIX + key.replace(".", "_").upper()


def _tables() -> list[str]:
    return [name for name, kind in get_type_hints(Settings).items() if is_dataclass(kind)]


def _types() -> dict[str, Any]:
    """Return the type of every setting by its full key."""
    types: dict[str, Any] = {}
    for name, hint in get_type_hints(Settings).items():
        if is_dataclass(hint):
            types |= {f"{name}.{inner}": t for inner, t in get_type_hints(hint).items()}
        else:
            types[name] = hint
    return types


def _convert(source: str, key: str, value: Any, *, is_text: bool) -> Any:
    types = _types()
    if key in _tables():
        raise SettingsError(
            f"{source}: there is no setting {key}: it is a section, [{key}] with its settings below"
        )
    if key not in types:
        raise SettingsError(f"{source}: there is no setting {key}{_hint(key, types)}")
    if isinstance(value, str) and "\0" in value:
        message = f"{source}: {key} contains a NUL character, which is not allowed"
        raise SettingsError(message, setting=key)
    is_secret = key in secret_keys()
    try:
        kind = str if is_secret else types[key]
        converted = convert(value, kind, strict=not is_text)
        return Secret(converted) if is_secret else converted
    except msgspec.ValidationError as error:
        names = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
        allowed = names.get(kind, str(kind))
        shown = "of another kind" if is_secret else repr(value)
        message = f"{source}: {key} is {shown}; allowed: {allowed}"
        raise SettingsError(message, setting=key) from error


def _hint(wrong: str, names: Iterable[str], *, prefix: str = "") -> str:
    """Return a suggestion for a wrong name. ``prefix``: common to all names, so not compared."""
    known = [name.removeprefix(prefix) for name in names]
    near = difflib.get_close_matches(wrong.removeprefix(prefix), known, n=1)
    meant = f"did you mean {prefix}{near[0]}? " if near else ""
    return f"; {meant}{FULL_LIST} lists all"
