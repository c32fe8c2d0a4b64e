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

from ledgers.codec.layout import MetadataUri
from ledgers.errors import SettingsError

Value = str | int | float | bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    """What becomes of one of Java's settings.

    ``key``: our setting; empty if there is no counterpart. ``convert``: turns Java's text into our
    value; None if our setting is best left alone for this value. Raises ValueError for a text that
    it does not know. ``note``: what the operator should know, or do instead.
    """

    key: str = ""
    convert: Callable[[str], Value | None] = str
    note: str = ""

    def __post_init__(self) -> None:
        assert self.key or self.note


def _ms(text: str) -> Value:
    return int(text) / 1000


def _not_negative(text: str) -> Value:
    return max(0, int(float(text)))


def _share(text: str) -> Value:
    return int(text) / 100


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


def _interval(text: str) -> Value | None:
    return int(text) or None


def _reread_delay(text: str) -> Value | None:
    """Return our delay if the bookies flush too seldom for the default one."""
    flush_s = int(text) / 1000
    return None if flush_s <= 60 else 2 * flush_s


ACLS = "ACLs and authentication: see the security settings of bookmender."
TLS = "TLS and authentication: see the security settings of bookmender."
METRICS = "Metrics and HTTP: see the HTTP settings of bookmender."
JAVA_METRICS = 'http.java_metrics = "standalone" keeps the names of the metrics.'
FLOWS = "Not needed: the number of entries in flight adapts to the bookies."
UNLIMITED_OPENS = "Not needed: checks are limited by checks.reads_per_s and checks.bytes_per_s."

TRANSLATIONS: Mapping[str, Translation] = {
    # Metadata
    "metadataServiceUri": Translation(key="metadata_service_uri"),
    "zkTimeout": Translation(key="zookeeper.session_timeout_s", convert=_ms),
    "zkRequestRateLimit": Translation(
        key="zookeeper.requests_per_s",
        convert=_not_negative,
        note="It applies to the auditor and the worker of a node, each.",
    ),
    "zkRetryBackoffStartMs": Translation(note="Not needed: requests are repeated as necessary."),
    "zkRetryBackoffMaxMs": Translation(note="Not needed: requests are repeated as necessary."),
    "zkEnableSecurity": Translation(note=ACLS),
    # Auditor
    "autoRecoveryDaemonEnabled": Translation(
        note="Set it to false in the bookies when bookmender replaces Java's AutoRecovery."
    ),
    "lostBookieRecoveryDelay": Translation(
        key="auditor.lost_bookie_recovery_delay_s",
        convert=int,
        note="Only used if the cluster has no znode lostBookieRecoveryDelay yet, as in Java.",
    ),
    "auditorPeriodicBookieCheckInterval": Translation(
        key="auditor.bookie_check_interval_s",
        convert=_interval,
        note="0 (only at the start) has no counterpart.",
    ),
    "auditorPeriodicCheckInterval": Translation(key="checks.all_ledgers_interval_s", convert=int),
    "auditorLedgerVerificationPercentage": Translation(
        key="checks.all_ledgers_share",
        convert=_share,
        note="Java's workers use it, too: see replication.checked_share.",
    ),
    "auditorPeriodicPlacementPolicyCheckInterval": Translation(
        key="checks.placement_interval_s", convert=int
    ),
    "auditorReplicasCheckInterval": Translation(key="checks.replicas_interval_s", convert=int),
    "underreplicatedLedgerRecoveryGracePeriod": Translation(
        key="checks.overdue_after_s", convert=int
    ),
    "repairedPlacementPolicyNotAdheringBookieEnabled": Translation(
        key="checks.repairs_placement", convert=_flag
    ),
    "auditorMaxNumberOfConcurrentOpenLedgerOperations": Translation(note=UNLIMITED_OPENS),
    "auditorAcquireConcurrentOpenLedgerOperationsTimeOutMSec": Translation(note=UNLIMITED_OPENS),
    "inFlightReadEntryNumInLedgerChecker": Translation(note=UNLIMITED_OPENS),
    "storeSystemTimeAsLedgerUnderreplicatedMarkTime": Translation(
        note="The time of a mark is always stored."
    ),
    # Worker
    "replicationRateByBytes": Translation(key="replication.bytes_per_s", convert=_not_negative),
    "openLedgerRereplicationGracePeriod": Translation(
        key="replication.open_ledger_grace_s", convert=_ms
    ),
    "lockReleaseOfFailedLedgerGracePeriod": Translation(
        key="replication.retry_max_s",
        convert=_ms,
        note="The first wait is replication.retry_min_s.",
    ),
    "rereplicationEntryBatchSize": Translation(note=FLOWS),
    "recoveryBatchReadEnabled": Translation(note="Batches are read wherever bookies support it."),
    "batchReadEnabled": Translation(note="Batches are read wherever bookies support it."),
    "rwRereplicateBackoffMs": Translation(
        note="Not needed: only the failed ledger waits, not the worker."
    ),
    "zkReplicationTaskRateLimit": Translation(
        note="No limit of ledgers per second: see zookeeper.requests_per_s."
    ),
    # Placement
    "ensemblePlacementPolicy": Translation(key="placement.policy", convert=_policy),
    "networkTopologyScriptFileName": Translation(key="placement.racks_script"),
    "reppDnsResolverClass": Translation(
        note="Racks come from placement.racks_file, racks_script or racks_znode. For Pulsar's "
        'BookieRackAffinityMapping set racks_znode = "/bookies".'
    ),
    "minNumRacksPerWriteQuorum": Translation(key="placement.min_racks", convert=int),
    "enforceMinNumRacksPerWriteQuorum": Translation(
        key="placement.enforce_min_racks", convert=_flag
    ),
    "reppRegionsToWrite": Translation(key="placement.regions"),
    "reppMinimumRegionsForDurability": Translation(key="placement.min_regions", convert=int),
    "reppEnableDurabilityEnforcementInReplace": Translation(
        key="placement.enforce_min_regions", convert=_flag
    ),
    "minNumZonesPerWriteQuorum": Translation(key="placement.min_zones", convert=int),
    "desiredNumZonesPerWriteQuorum": Translation(key="placement.desired_zones", convert=int),
    "enforceStrictZoneawarePlacement": Translation(key="placement.enforce_zones", convert=_flag),
    "diskWeightBasedPlacementEnabled": Translation(
        key="placement.weighted_by_free_disk", convert=_flag
    ),
    "bookieMaxMultipleForWeightBasedPlacement": Translation(
        key="placement.disk_weight_max", convert=float
    ),
    "enforceMinNumFaultDomainsForWrite": Translation(
        note="It concerns writers; copies follow placement.enforce_min_racks."
    ),
    # The bookie beside the node
    "bookieId": Translation(key="node.bookie_id"),
    "flushInterval": Translation(
        key="replication.copies_reread_after_s",
        convert=_reread_delay,
        note="New copies must be read again after the bookies have flushed.",
    ),
    "diskUsageThreshold": Translation(
        note="Copies stop earlier, at replication.free_disk_share_min."
    ),
    # The digest of ledgers whose metadata holds none
    "digestType": Translation(
        key="replication.default_digest_type",
        convert=lambda text: "HMAC" if text.upper() == "MAC" else text.upper(),
    ),
    "passwd": Translation(
        note="A secret, and not copied: see replication.default_password. It is only used for "
        "ledgers of BookKeeper before 4.2."
    ),
    # Elsewhere
    "clientAuthProviderFactoryClass": Translation(note=TLS),
    "tlsProvider": Translation(note=TLS),
    "tlsProviderFactoryClass": Translation(note=TLS),
    "tlsClientAuthentication": Translation(note=TLS),
    "tlsKeyStore": Translation(note=TLS),
    "tlsTrustStore": Translation(note=TLS),
    "tlsCertificatePath": Translation(note=TLS),
    "httpServerEnabled": Translation(note=METRICS),
    "httpServerPort": Translation(note=METRICS),
    "statsProviderClass": Translation(note=JAVA_METRICS),
    "prometheusStatsHttpPort": Translation(note=METRICS),
}
"""By Java's name. Settings that are not here configure the bookie itself."""

OF_BOOKIE_ID = ("advertisedAddress", "bookiePort")
"""The ID of the bookie in files without ``bookieId``, if the address is set."""
BOOKIE_PORT = "3181"
LEGACY_ADDRESS = ("zkServers", "zkLedgersRootPath", "ledgerManagerFactoryClass")
"""The address of the cluster in files without ``metadataServiceUri``."""
LEDGERS_ROOT = "/ledgers"


def read_properties(path: Path) -> dict[str, str]:
    """Read a Java properties file. Raises SettingsError if it cannot be read."""
    try:
        text = path.read_text("utf-8", errors="replace")
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror}") from error
    found: dict[str, str] = {}
    for line in re.sub(r"\\\r?\n[ \t]*", "", text).splitlines():
        line = line.strip()
        if not line or line[0] in "#!":
            continue
        pair = re.match(r"([^\s=:]+)\s*[=:\s]\s*(.*)", line)
        if pair and pair[2]:
            found[pair[1]] = pair[2]
    return found


def metadata_uri(properties: Mapping[str, str]) -> str:
    """Return the address of the cluster. Raises SettingsError if the file names none."""
    if uri := properties.get("metadataServiceUri"):
        return uri
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
    whose values are not understood. ``others``: names of settings that do not concern recovery.
    """

    values: Mapping[str, tuple[Value, str]]
    notes: Mapping[str, str]
    wrong: Sequence[str] = ()
    others: Sequence[str] = ()


def translate(properties: Mapping[str, str]) -> Imported:
    """Translate Java's settings. Raises SettingsError if the file names no cluster."""
    uri = metadata_uri(properties)
    MetadataUri.parse(uri)
    values: dict[str, tuple[Value, str]] = {"metadata_service_uri": (uri, "")}
    notes: dict[str, str] = {}
    wrong: list[str] = []
    others: list[str] = []
    address = properties.get("advertisedAddress")
    if address and "bookieId" not in properties:
        bookie_id = f"{address}:{properties.get('bookiePort', BOOKIE_PORT)}"
        values["node.bookie_id"] = (bookie_id, "advertisedAddress and bookiePort")
    for name, text in properties.items():
        if name in LEGACY_ADDRESS or (address and name in OF_BOOKIE_ID):
            continue
        if (found := TRANSLATIONS.get(name)) is None:
            others.append(name)
            continue
        told = f"{name} = {'hidden' if _is_secret(name) else text}"
        try:
            value = found.convert(text) if found.key else None
        except ValueError:
            wrong.append(told)
            continue
        if value is not None:
            values[found.key] = (value, told + (f". {found.note}" if found.note else ""))
        elif found.note:
            notes[told] = found.note
    return Imported(values=values, notes=notes, wrong=wrong, others=sorted(others))


def _is_secret(name: str) -> bool:
    return bool(re.search("passw(or)?d|secret|token", name, re.IGNORECASE))


def to_toml(imported: Imported) -> str:
    """Return a settings file, with comments for what has no counterpart."""
    lines = ["# Translated from Java's settings. Check it: bookmender config check -c FILE"]
    uri, _ = imported.values["metadata_service_uri"]
    lines.append(f"metadata_service_uri = {_toml(uri)}")
    sections: dict[str, list[str]] = {}
    for key, (value, note) in imported.values.items():
        section, _, name = key.rpartition(".")
        if section:
            comment = [f"# {note}"] if note else []
            sections.setdefault(section, []).extend([*comment, f"{name} = {_toml(value)}"])
    for section, below in sections.items():
        lines += ["", f"[{section}]", *below]
    if imported.notes:
        lines += ["", "# Without a counterpart:"]
        lines += [f"# {what}\n#   {note}" for what, note in imported.notes.items()]
    if imported.wrong:
        lines += ["", "# Not understood, and left out:"]
        lines += [f"# {what}" for what in imported.wrong]
    if imported.others:
        lines += ["", "# Not about recovery:"]
        lines += [f"# {name}" for name in imported.others]
    return "\n".join(lines)


def _toml(value: Value) -> str:
    """Return the value as TOML: basic strings, numbers and booleans are written as in JSON."""
    return json.dumps(value, ensure_ascii=False)
