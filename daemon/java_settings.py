"""Translates the settings of Java's AutoRecovery, ``bk_server.conf``, into a settings file of ours.

``TRANSLATIONS`` lists every setting of Java that concerns auto-recovery: what it becomes, or why it
has no counterpart. Names, units and defaults are those of ``conf/bk_server.conf`` and of
``ServerConfiguration`` in BookKeeper 4.16 to 4.18. ``to_toml`` writes the file.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from daemon.words import printable
from ledgers.codec.layout import MetadataUri
from ledgers.errors import SettingsError
from ledgers.placement.pulsar import PULSAR_RACKS_PATH

Value = str | int | float | bool


class Translation(NamedTuple):
    """What becomes of one of Java's settings.

    ``key``: our setting; empty if there is no counterpart. ``convert``: turns Java's text into our
    value; None if our setting is best left alone for this value. Raises ValueError for a text that
    it does not know. ``note``: what the operator should know, or do instead.
    """

    key: str = ""
    convert: Callable[[str], Value | None] = str
    note: str = ""


def _ms(text: str) -> Value:
    return int(text) / 1000


def _not_negative(text: str) -> Value:
    return max(0, int(float(text)))


def _flag(text: str) -> Value:
    if text.lower() not in ("true", "false"):
        raise ValueError(text)
    return text.lower() == "true"


def _policy(text: str) -> Value:
    for name, policy in (
        ("Region", "region"),
        ("Zone", "zone"),
        ("Rackaware", "rack"),
        ("LocalBookie", "random"),
        ("Default", "random"),
    ):
        if name in text.rpartition(".")[2]:
            return policy
    raise ValueError(text)


def _reread_delay(text: str) -> Value | None:
    """Return our delay if the bookies flush too seldom for the default one."""
    flush_s = int(text) / 1000
    return None if flush_s <= 60 else 2 * flush_s


PULSAR_RESOLVER = "BookieRackAffinityMapping"
"""The end of the names of Pulsar's classes that read racks from ZooKeeper: ``Zk…`` until 2.8."""

WITHOUT_COUNTERPART: Mapping[str, tuple[str, ...]] = {
    "Not needed: requests are repeated as necessary.": (
        "zkRetryBackoffStartMs",
        "zkRetryBackoffMaxMs",
    ),
    "ACLs and authentication: see the security settings of bookmender.": ("zkEnableSecurity",),
    "Set it to false in the bookies when bookmender replaces Java's AutoRecovery.": (
        "autoRecoveryDaemonEnabled",
    ),
    "The metric bookmender_oldest_mark_age_seconds and its alert rules replace it.": (
        "underreplicatedLedgerRecoveryGracePeriod",
    ),
    "Not needed: checks are limited by checks.reads_per_s and checks.bytes_per_s.": (
        "auditorMaxNumberOfConcurrentOpenLedgerOperations",
        "auditorAcquireConcurrentOpenLedgerOperationsTimeOutMSec",
        "inFlightReadEntryNumInLedgerChecker",
    ),
    "The time of a mark is always stored.": ("storeSystemTimeAsLedgerUnderreplicatedMarkTime",),
    "Not needed: the number of entries in flight adapts to the bookies.": (
        "rereplicationEntryBatchSize",
    ),
    "Batches are read wherever bookies support it.": (
        "recoveryBatchReadEnabled",
        "batchReadEnabled",
    ),
    "Not needed: only the failed ledger waits, not the worker.": ("rwRereplicateBackoffMs",),
    "No limit of ledgers per second: see zookeeper.requests_per_s.": (
        "zkReplicationTaskRateLimit",
    ),
    "It concerns writers; copies follow placement.enforce_min_racks.": (
        "enforceMinNumFaultDomainsForWrite",
    ),
    "Copies stop earlier, at replication.free_disk_share_min.": ("diskUsageThreshold",),
    "A secret, and not copied: see replication.default_password. It is only used for ledgers of "
    "BookKeeper before 4.2.": ("passwd",),
    "TLS and authentication: see the security settings of bookmender.": (
        "clientAuthProviderFactoryClass",
        "tlsProvider",
        "tlsProviderFactoryClass",
        "tlsClientAuthentication",
        "tlsKeyStore",
        "tlsTrustStore",
        "tlsCertificatePath",
    ),
    "Metrics and HTTP: see the HTTP settings of bookmender.": (
        "httpServerEnabled",
        "httpServerPort",
        "prometheusStatsHttpPort",
    ),
    "deploy/prometheus/java_names.rules.yaml keeps the names of the metrics.": (
        "statsProviderClass",
    ),
}
"""By note: the settings of Java that it is about."""

T = Translation
TRANSLATIONS: Mapping[str, Translation] = {
    "metadataServiceUri": T("metadata_service_uri"),
    "zkTimeout": T("zookeeper.session_timeout_s", _ms),
    "zkRequestRateLimit": T(
        "zookeeper.requests_per_s",
        _not_negative,
        "It applies to the auditor and the worker of a node, each.",
    ),
    "lostBookieRecoveryDelay": T(
        "auditor.lost_bookie_recovery_delay_s",
        int,
        "Only used if the cluster has no znode lostBookieRecoveryDelay yet, as in Java.",
    ),
    "auditorPeriodicBookieCheckInterval": T(
        "auditor.bookie_check_interval_s",
        lambda text: int(text) or None,
        "0 (only at the start) has no counterpart.",
    ),
    "auditorPeriodicCheckInterval": T("checks.all_ledgers_interval_s", int),
    "auditorLedgerVerificationPercentage": T(
        "checks.all_ledgers_share",
        lambda text: int(text) / 100,
        "Java's workers use it, too: see replication.checked_share.",
    ),
    "auditorPeriodicPlacementPolicyCheckInterval": T("checks.placement_interval_s", int),
    "auditorReplicasCheckInterval": T("checks.replicas_interval_s", int),
    "repairedPlacementPolicyNotAdheringBookieEnabled": T("checks.repairs_placement", _flag),
    "replicationRateByBytes": T("replication.bytes_per_s", _not_negative),
    "openLedgerRereplicationGracePeriod": T("replication.open_ledger_grace_s", _ms),
    "lockReleaseOfFailedLedgerGracePeriod": T(
        "replication.retry_max_s", _ms, "The first wait is replication.retry_min_s."
    ),
    "ensemblePlacementPolicy": T("placement.policy", _policy),
    "networkTopologyScriptFileName": T("placement.racks_script"),
    "reppDnsResolverClass": T(
        "placement.racks_znode",
        lambda text: PULSAR_RACKS_PATH if text.endswith(PULSAR_RESOLVER) else None,
        "Racks come from placement.racks_file, racks_script or racks_znode.",
    ),
    "minNumRacksPerWriteQuorum": T("placement.min_racks", int),
    "enforceMinNumRacksPerWriteQuorum": T("placement.enforce_min_racks", _flag),
    "reppRegionsToWrite": T("placement.regions"),
    "reppMinimumRegionsForDurability": T("placement.min_regions", int),
    "reppEnableDurabilityEnforcementInReplace": T("placement.enforce_min_regions", _flag),
    "minNumZonesPerWriteQuorum": T("placement.min_zones", int),
    "desiredNumZonesPerWriteQuorum": T("placement.desired_zones", int),
    "enforceStrictZoneawarePlacement": T("placement.enforce_zones", _flag),
    "diskWeightBasedPlacementEnabled": T("placement.weighted_by_free_disk", _flag),
    "bookieMaxMultipleForWeightBasedPlacement": T("placement.disk_weight_max", float),
    "bookieId": T("node.bookie_id"),
    "flushInterval": T(
        "replication.copies_reread_after_s",
        _reread_delay,
        "New copies must be read again after the bookies have flushed.",
    ),
    "digestType": T(
        "replication.default_digest_type",
        lambda text: "HMAC" if text.upper() == "MAC" else text.upper(),
    ),
    **{name: T(note=note) for note, names in WITHOUT_COUNTERPART.items() for name in names},
}
"""By Java's name. Settings that are not here configure the bookie itself."""

OF_BOOKIE_ID = ("advertisedAddress", "bookiePort")
"""The ID of the bookie in files without ``bookieId``, if the address is set."""
BOOKIE_PORT = "3181"
ADDRESS = ("metadataServiceUri", "zkServers", "zkLedgersRootPath")
"""The address of the cluster: the first, or the other two."""
ADDRESSES = (*ADDRESS, "ledgerManagerFactoryClass")
LEDGERS_ROOT = "/ledgers"
LISTS = frozenset({"zkServers", "metadataServiceUri"})
"""Settings of which all values are kept. Java uses all of the first, and one of the second."""
FILE_BYTES_MAX = 1 << 20
BLANKS = "".join(map(chr, range(0x21)))
"""The characters that Java's ``String.trim`` removes."""
ESCAPES = dict(zip("tnrbf\\'\"=:#!", "\t\n\r\b\f\\'\"=:#!", strict=True))


def read_properties(path: Path) -> dict[str, str]:
    """Read a Java properties file as BookKeeper's loader does (commons-configuration).

    Of several values of a name, on one line or several, the first counts. Variables (``${``) stay
    as they are: ``translate`` names them. Java's characters are Latin-1. Raises SettingsError if
    the file cannot be read, or includes another one.
    """
    try:
        with path.open(encoding="latin-1") as file:
            text = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror}") from error
    if len(text) > FILE_BYTES_MAX:
        raise SettingsError(f"{path}: larger than {FILE_BYTES_MAX:,} bytes. Give bk_server.conf")
    read: dict[str, list[str]] = {}
    parts: list[str] = []
    for line in text.split("\n"):  # all kinds of line ends are \n by now
        line = line.strip(BLANKS)
        if not line or line[0] in "#!":  # also in the middle of a continued line
            continue
        if (len(line) - len(line.rstrip("\\"))) % 2:
            parts.append(line[:-1])
            continue
        pair = re.fullmatch(
            r"((?:[^\s\\=:]|\\.)*)(?:\s*[=:]\s*|\s+|)(.*)",
            "".join((*parts, line)),
            re.ASCII | re.DOTALL,
        )
        parts.clear()
        assert pair, line
        name, value = (_unescaped(part, path) for part in pair.groups())
        if name.lower() in ("include", "includeoptional"):
            # Its settings may come before those of this file, such as the address of the cluster.
            raise SettingsError(
                f"{path}: has {name} = {value}, which is not followed. Give a copy of the file "
                "with the lines of that one in its place"
            )
        read.setdefault(name.replace("\\ ", " "), []).append(value)
    found = {
        name: ",".join(values) if name in LISTS else _first_value(values[0])
        for name, values in read.items()
    }
    return {name: value for name, value in found.items() if value}


def _first_value(text: str) -> str:
    """Return the text up to the first comma, where Java divides values, also after a backslash."""
    first, comma, _ = text.partition(",")
    return (first.rstrip("\\") if comma else first).strip()


def _unescaped(text: str, path: Path) -> str:
    """Return the text with Java's escapes replaced. An unknown escape stays as it is."""

    def character(escape: re.Match[str]) -> str:
        code = escape[1]
        if code[0] != "u":
            return ESCAPES.get(code, escape[0])
        try:
            return chr(int(code[1:], 16)) if len(code) == 5 else ""
        except ValueError as error:
            raise SettingsError(f"{path}: wrong escape {escape[0]}") from error

    return re.sub(r"\\(u.{0,4}|.)", character, text, flags=re.DOTALL)


def metadata_uri(properties: Mapping[str, str]) -> str:
    """Return the address of the cluster. Raises SettingsError if the file names none."""
    if unknown := [name for name in ADDRESS if "${" in properties.get(name, "")]:
        raise SettingsError(
            f"{unknown[0]} = {properties[unknown[0]]} uses a variable. Write the value into a copy "
            "of the file"
        )
    if uri := properties.get("metadataServiceUri"):
        return _first_value(uri)
    if servers := properties.get("zkServers"):
        hosts = ";".join(part.strip() for part in re.split("[,;]", servers) if part.strip())
        # Without a layout it is read from the cluster, which knows better than the file.
        return f"zk://{hosts}{properties.get('zkLedgersRootPath', LEDGERS_ROOT)}"
    raise SettingsError(
        "the file has neither metadataServiceUri nor zkServers. Give Java's bk_server.conf"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """The result of a translation.

    ``values``: our settings, and the note about each, which may be empty. ``notes``: Java's
    settings without counterpart, as ``name = value``, and what to do. ``wrong``: Java's settings
    whose values are not understood, or use a variable. ``others``: names of
    settings that do not concern recovery.
    """

    values: Mapping[str, tuple[Value, str]]
    notes: Mapping[str, str]
    wrong: Sequence[str] = ()
    others: Sequence[str] = ()


def translate(properties: Mapping[str, str]) -> Imported:
    """Translate Java's settings. Raises SettingsError if the file names no cluster."""
    uri = metadata_uri(properties)
    MetadataUri.parse(uri)
    given = properties.get("metadataServiceUri", "")
    note = f"Java and the bookies use only what is before the comma. Write ; in: {given}"
    values: dict[str, tuple[Value, str]] = {"metadata_service_uri": (uri, note * ("," in given))}
    notes: dict[str, str] = {}
    wrong: list[str] = []
    others: list[str] = []
    address = properties.get("advertisedAddress")
    if address and "bookieId" not in properties:
        bookie_id = f"{address}:{properties.get('bookiePort', BOOKIE_PORT)}"
        if "${" in bookie_id:
            wrong.append(f"advertisedAddress and bookiePort: {bookie_id}")
        else:
            values["node.bookie_id"] = (bookie_id, "advertisedAddress and bookiePort")
    for name, text in properties.items():
        if name in ADDRESSES or (address and name in OF_BOOKIE_ID):
            continue
        if (found := TRANSLATIONS.get(name)) is None:
            others.append(name)
            continue
        told = f"{name} = {'hidden' if _is_secret(name) else text}"
        if found.key and "${" in text:
            wrong.append(told)
            continue
        try:
            value = found.convert(text) if found.key else None
        except ValueError:
            wrong.append(told)
            continue
        if value is not None:
            values[found.key] = (value, told + (f". {found.note}" if found.note else ""))
        elif found.note:
            notes[told] = found.note
    if "placement.racks_znode" in values:  # only Java's default resolver asks the script
        values.pop("placement.racks_script", None)
    return Imported(values=values, notes=notes, wrong=wrong, others=sorted(others))


def _is_secret(name: str) -> bool:
    return bool(re.search("passw(or)?d|secret|token", name, re.IGNORECASE))


def to_toml(imported: Imported) -> str:
    """Return a settings file, with comments for what has no counterpart."""
    lines = ["# Translated from Java's settings. Check it: bookmender config check -c FILE"]
    uri, note = imported.values["metadata_service_uri"]
    lines += [f"# {printable(note)}"] if note else []
    lines.append(f"metadata_service_uri = {_toml(uri)}")
    sections: dict[str, list[str]] = {}
    for key, (value, note) in imported.values.items():
        section, _, name = key.rpartition(".")
        if section:
            comment = [f"# {printable(note)}"] if note else []
            sections.setdefault(section, []).extend([*comment, f"{name} = {_toml(value)}"])
    for section, below in sections.items():
        lines += ["", f"[{section}]", *below]
    if imported.notes:
        lines += ["", "# Without a counterpart:"]
        lines += [f"# {printable(what)}\n#   {note}" for what, note in imported.notes.items()]
    if imported.wrong:
        lines += ["", "# Not understood, or with a variable, and left out:"]
        lines += [f"# {printable(what)}" for what in imported.wrong]
    if imported.others:
        lines += ["", "# Not about recovery:"]
        lines += [f"# {printable(name)}" for name in imported.others]
    return "\n".join(lines)


def _toml(value: Value) -> str:
    """Return the value as TOML: basic strings, numbers and booleans are written as in JSON."""
    return json.dumps(value, ensure_ascii=False)
