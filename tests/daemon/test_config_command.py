"""``bookmender config``: effective settings, conflicts, and Java's settings."""

import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from daemon.cli.config import config
from daemon.conflicts import conflicts
from daemon.java_settings import TRANSLATIONS, read_properties, to_toml, translate
from daemon.local.security import Authority
from daemon.settings import Settings, load_settings, setting_keys
from ledgers.errors import SettingsError
from tests.certificates import need_openssl
from tests.daemon.cli_calls import exit_code

URI = "zk+hierarchical://zk1:2181;zk2:2181/ledgers"

Call = Callable[..., Result]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> Call:
    monkeypatch.setenv("BOOKMENDER_METADATA_SERVICE_URI", URI)
    return lambda *arguments: CliRunner().invoke(config, arguments)


# --- config show ----------------------------------------------------------------------------------


def test_each_setting_has_a_source(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "bookmender.toml"
    file.write_text('[log]\nlevel = "debug"\n[hold]\nshare = 0.5\n')
    monkeypatch.setenv("BOOKMENDER_HOLD_SHARE", "0.7")

    record = json.loads(call("show", "-c", str(file), "-o", "json").stdout)

    found: dict[str, Any] = {each["setting"]: each for each in record["settings"]}
    assert list(found) == setting_keys()
    assert found["log.format"] | {"setting": ""} == {
        "setting": "",
        "value": "auto",
        "source": "default",
        "where": None,
    }
    assert (found["log.level"]["source"], found["log.level"]["where"]) == ("file", str(file))
    share = found["hold.share"]
    assert (share["value"], share["where"]) == (0.7, "BOOKMENDER_HOLD_SHARE")


def test_the_text_is_a_settings_file(call: Call, tmp_path: Path) -> None:
    shown = tmp_path / "shown.toml"

    shown.write_text(call("show").stdout)

    assert load_settings(shown, {}) == Settings(metadata_service_uri=URI)


def test_changed_settings_can_be_shown_alone(call: Call) -> None:
    (line,) = call("show", "--changed").stdout.strip().splitlines()

    assert line.startswith("metadata_service_uri = ")


@pytest.mark.parametrize("output", ["text", "json"])
def test_secrets_are_not_shown(call: Call, monkeypatch: pytest.MonkeyPatch, output: str) -> None:
    monkeypatch.setenv("BOOKMENDER_REPLICATION_DEFAULT_PASSWORD", "hunter2")

    shown = call("show", "-o", output).stdout

    assert "hunter2" not in shown
    assert "(hidden)" in shown


# --- config check ---------------------------------------------------------------------------------


def test_the_defaults_have_no_conflicts(call: Call) -> None:
    assert conflicts(Settings(metadata_service_uri=URI)) == []
    assert call("check").exit_code == 0


FIGHTING = {
    "auditor.enabled": {"AUDITOR_ENABLED": "false", "REPLICATION_ENABLED": "false"},
    "auditor.standbys_keep_ledger_map": {
        "AUDITOR_ENABLED": "false",
        "AUDITOR_STANDBYS_KEEP_LEDGER_MAP": "true",
    },
    "checks.all_ledgers_share": {
        "CHECKS_ALL_LEDGERS_SHARE": "1",
        "CHECKS_ALL_LEDGERS_INTERVAL_S": "0",
    },
    "checks.placement_interval_s": {
        "CHECKS_REPAIRS_PLACEMENT": "true",
        "PLACEMENT_RACKS_ZNODE": "/bookies",
        "CHECKS_PLACEMENT_INTERVAL_S": "0",
    },
    "placement.racks_file": {"CHECKS_REPAIRS_PLACEMENT": "true"},
    "hold.share": {"HOLD_SHARE": "1"},
    "replication.free_disk_share_min": {"REPLICATION_FREE_DISK_SHARE_MIN": "0"},
    "replication.copies_reread_after_s": {"REPLICATION_COPIES_REREAD_AFTER_S": "5"},
    "replication.bytes_per_s": {
        "REPLICATION_ENABLED": "false",
        "REPLICATION_BYTES_PER_S": "1000",
    },
    "placement.regions": {"PLACEMENT_REGIONS": "R1"},
    "placement.disk_weight_max": {"PLACEMENT_DISK_WEIGHT_MAX": "5"},
    "zookeeper.connect_timeout_s": {"ZOOKEEPER_CONNECT_TIMEOUT_S": "1"},
    "zookeeper.request_bytes_max": {"ZOOKEEPER_REQUEST_BYTES_MAX": "4000000"},
}


@pytest.mark.parametrize(("key", "given"), FIGHTING.items(), ids=FIGHTING)
def test_settings_that_fight_each_other_are_found(key: str, given: dict[str, str]) -> None:
    environment = {f"BOOKMENDER_{name}": value for name, value in given.items()}
    settings = load_settings(None, {"BOOKMENDER_METADATA_SERVICE_URI": URI, **environment})

    (found,) = conflicts(settings)

    assert key in found.keys
    assert set(found.keys) <= set(setting_keys())


def test_a_conflict_is_told_and_ends_with_1(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOOKMENDER_HOLD_SHARE", "1")

    result = call("check")

    assert result.exit_code == 1
    assert result.stdout.splitlines()[0].startswith("hold.enabled, hold.share: with a share of 1")


@pytest.mark.parametrize(
    "given",
    [
        pytest.param({"HOLD_SHARE": "7"}, id="a wrong value"),
        pytest.param({"PLACEMENT_RACKS_FILE": "/does/not/exist"}, id="no file of racks"),
        pytest.param(
            {"SECURITY_BOOKIE_TLS": "true", "SECURITY_CA_FILE": "/does/not/exist"}, id="no CA"
        ),
        pytest.param(
            {"SECURITY_BOOKIE_TLS": "true", "SECURITY_CA_FILE": __file__}, id="no certificate"
        ),
    ],
)
def test_wrong_settings_end_with_2(monkeypatch: pytest.MonkeyPatch, given: dict[str, str]) -> None:
    for name, value in {"METADATA_SERVICE_URI": URI, **given}.items():
        monkeypatch.setenv(f"BOOKMENDER_{name}", value)

    assert exit_code(monkeypatch, "config", "check") == 2


@pytest.mark.parametrize(("mode", "code"), [(0o640, 0), (0o644, 1), (0o642, 1)])
def test_a_password_file_that_all_may_read_or_change_is_found(
    call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mode: int, code: int
) -> None:
    password_file = tmp_path / "password"
    password_file.write_text("hunter2")
    password_file.chmod(mode)
    monkeypatch.setenv("BOOKMENDER_SECURITY_ZOOKEEPER_USER", "bookmender")
    monkeypatch.setenv("BOOKMENDER_SECURITY_ZOOKEEPER_PASSWORD_FILE", str(password_file))

    result = call("check")

    assert result.exit_code == code
    assert ("security.zookeeper_password_file" in result.stdout) is bool(code)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        pytest.param(None, "the token cannot be read: No such file or directory", id="missing"),
        pytest.param("short", "the token has fewer than 16 characters", id="too short"),
        pytest.param("long-enough-for-a-token", "", id="usable"),
    ],
)
def test_an_unusable_token_file_is_found(
    call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str | None, said: str
) -> None:
    """The node would start, and refuse each change over HTTP."""
    file = tmp_path / "token"
    if text is not None:
        file.write_text(text)
        file.chmod(0o640)
    monkeypatch.setenv("BOOKMENDER_HTTP_TOKEN_FILE", str(file))

    result = call("check")

    assert said in str(result.exception)
    assert isinstance(result.exception, SettingsError) is bool(said)


def test_a_secret_in_a_file_that_all_may_read_is_found(call: Call, tmp_path: Path) -> None:
    file = tmp_path / "bookmender.toml"
    file.write_text('[replication]\ndefault_password = "hunter2"\n')  # the URI is a variable

    file.chmod(0o644)
    told = call("check", "-c", str(file))
    file.chmod(0o640)
    quiet = call("check", "-c", str(file))

    assert (told.exit_code, quiet.exit_code) == (1, 0)
    assert "hunter2" not in told.stdout


def test_a_setting_without_effect_is_named(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOOKMENDER_CHECKS_OVERDUE_AFTER_S", "60")

    told = call("check")

    assert told.exit_code == 0
    assert "checks.overdue_after_s" in told.stdout


def test_the_files_of_the_http_server_are_checked(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_openssl()
    both = Authority(tmp_path).issue("server").both
    monkeypatch.setenv("BOOKMENDER_HTTP_CERTIFICATE_FILE", str(both))

    both.chmod(0o640)
    quiet = call("check")
    both.chmod(0o644)
    exposed = call("check")
    both.write_text("no certificate")
    wrong = call("check")

    assert (quiet.exit_code, exposed.exit_code) == (0, 1)
    assert "http.certificate_file" in exposed.stdout
    assert isinstance(wrong.exception, SettingsError)
    assert "http.certificate_file" in str(wrong.exception)


# --- config import --------------------------------------------------------------------------------

JAVA = """\
# A comment
metadataServiceUri=zk+hierarchical://zk1:2181;zk2:2181/ledgers
zkTimeout = 20000
lostBookieRecoveryDelay: 300
auditorLedgerVerificationPercentage=50
replicationRateByBytes=-1
openLedgerRereplicationGracePeriod=15000
ensemblePlacementPolicy=org.apache.bookkeeper.client.RegionAwareEnsemblePlacementPolicy
networkTopologyScriptFileName=/bin/true
repairedPlacementPolicyNotAdheringBookieEnabled=true
rereplicationEntryBatchSize=100
passwd=hunter2
journalDirectories=/data/journal,\\
    /data/journal-2
"""


@pytest.fixture
def java_file(tmp_path: Path) -> Path:
    path = tmp_path / "bk_server.conf"
    path.write_text(JAVA)
    return path


def test_javas_settings_become_ours(java_file: Path, tmp_path: Path) -> None:
    ours = tmp_path / "bookmender.toml"

    ours.write_text(to_toml(translate(read_properties(java_file))))

    settings = load_settings(ours, {})
    assert settings.metadata_service_uri == URI
    assert settings.zookeeper.session_timeout_s == 20
    assert settings.auditor.lost_bookie_recovery_delay_s == 300
    assert settings.checks.all_ledgers_share == 0.5
    assert settings.checks.repairs_placement
    assert settings.replication.bytes_per_s == 0
    assert settings.replication.open_ledger_grace_s == 15
    assert settings.placement.policy == "region"


@pytest.mark.parametrize(
    ("text", "bookie_id"),
    [
        pytest.param("bookieId=b-1\nadvertisedAddress=h\n", "b-1", id="an ID"),
        pytest.param("advertisedAddress=h\nbookiePort=3000\n", "h:3000", id="an address"),
        pytest.param("advertisedAddress=h\n", "h:3181", id="the default port"),
        pytest.param("bookiePort=3000\n", None, id="found by the node itself"),
    ],
)
def test_the_bookie_beside_the_node_is_named(
    java_file: Path, text: str, bookie_id: str | None
) -> None:
    java_file.write_text(JAVA + text)

    found = translate(read_properties(java_file)).values.get("node.bookie_id")

    assert (found[0] if found else None) == bookie_id


@pytest.mark.parametrize(
    ("text", "values"),
    [
        pytest.param(b"a=first\na=second\n", {"a": "first"}, id="the first line counts"),
        pytest.param(b"a=\na=second\n", {}, id="an empty first line counts, too"),
        pytest.param(b"a=x,y\nb=x\\,y\n", {"a": "x", "b": "x"}, id="the first value counts"),
        pytest.param(
            b"a: x\nb x y\n c = : z \nd\n", {"a": "x", "b": "x y", "c": ": z"}, id="signs"
        ),
        pytest.param(
            b"a\\ b=1\nc\\=d=2\n\\u0041=3\n", {"a b": "1", "c=d": "2", "A": "3"}, id="names"
        ),
        pytest.param(b"#a=1\n  !b=1\nc=d#e\n", {"c": "d#e"}, id="comments"),
        pytest.param(b"a=C:\\temp\\\\x\\q\\:\n", {"a": "C:\temp\\x\\q:"}, id="escapes"),
        pytest.param(b"a=\\u00e9\xe9\n", {"a": "\u00e9\u00e9"}, id="characters of Latin-1"),
        pytest.param(
            b"a=x\\\r\n  y\r\nb=c\\\\\nd=e\n", {"a": "xy", "b": "c\\", "d": "e"}, id="continued"
        ),
        pytest.param(b"a=x \\\n# no\n\ny\n", {"a": "x y"}, id="a comment in a continued line"),
        pytest.param(b"a=x\\", {}, id="nothing continues the last line"),
        pytest.param(b"a=\x0cx\x0c\x85y\n", {"a": "x\x0c\x85y"}, id="no other line ends"),
        pytest.param(b"zkServers=a\nzkServers=b,c\n", {"zkServers": "a,b,c"}, id="a list"),
        pytest.param(b"a=${env:X}\n", {"a": "${env:X}"}, id="variables stay"),
    ],
)
def test_a_file_is_read_as_javas_loader_reads_it(
    java_file: Path, text: bytes, values: dict[str, str]
) -> None:
    """The values are those of ``ServerConfiguration`` of BookKeeper 4.18.0."""
    java_file.write_bytes(text)

    assert read_properties(java_file) == values


@pytest.mark.parametrize(
    ("text", "error"),
    [
        pytest.param("Include=other\n", "not followed", id="settings of another file"),
        pytest.param("includeoptional=x\n", "not followed", id="perhaps of another file"),
        pytest.param("a=" + "b" * 2**20, "larger than", id="no settings file"),
        pytest.param("a=\\u00zz\n", "wrong escape", id="no character"),
        pytest.param(
            "metadataServiceUri=${env:URI}\n", r"\$\{env:URI\} uses a variable", id="cluster"
        ),
    ],
)
def test_a_file_that_java_would_not_load_is_refused(java_file: Path, text: str, error: str) -> None:
    java_file.write_text(text)

    with pytest.raises(SettingsError, match=error):
        translate(read_properties(java_file))


def test_a_variable_is_named_and_never_written(java_file: Path) -> None:
    java_file.write_text(
        JAVA.replace("=15000", "=${sys:grace}").replace("/bin/true", "${env:SCRIPT}")
        + "advertisedAddress=${env:HOST}\n"
    )

    imported = translate(read_properties(java_file))

    assert sorted(imported.wrong) == [
        "advertisedAddress and bookiePort: ${env:HOST}:3181",
        "networkTopologyScriptFileName = ${env:SCRIPT}",
        "openLedgerRereplicationGracePeriod = ${sys:grace}",
    ]
    assert not [value for value, _ in imported.values.values() if "${" in str(value)]


def test_a_value_cannot_leave_its_comment(java_file: Path) -> None:
    java_file.write_text(JAVA + "rwRereplicateBackoffMs=1\\n[http]\\nport = 1\nx\\u000ay=1\n")

    document = tomllib.loads(to_toml(translate(read_properties(java_file))))

    assert "http" not in document


@pytest.mark.parametrize(
    "resolver",
    [
        "org.apache.pulsar.bookie.rackawareness.BookieRackAffinityMapping",
        pytest.param("org.apache.pulsar.zookeeper.ZkBookieRackAffinityMapping", id="until 2.8"),
    ],
)
def test_pulsars_resolver_becomes_its_znode(java_file: Path, resolver: str) -> None:
    java_file.write_text(JAVA + f"reppDnsResolverClass={resolver}\n")

    values = translate(read_properties(java_file)).values

    assert values["placement.racks_znode"][0] == "/bookies"
    assert "placement.racks_script" not in values, "Java asks only the resolver"


def test_what_has_no_counterpart_is_a_comment(java_file: Path) -> None:
    result = CliRunner().invoke(config, ["import", str(java_file)])

    comments = [line for line in result.stdout.splitlines() if line.startswith("#")]
    assert result.exit_code == 0
    assert "# rereplicationEntryBatchSize = 100" in comments
    assert "# journalDirectories" in comments
    assert "hunter2" not in result.stdout


@pytest.mark.parametrize(
    ("java", "told"),
    [
        pytest.param(
            JAVA + "zkRequestRateLimit=many\n", "# zkRequestRateLimit = many", id="not understood"
        ),
        pytest.param(
            JAVA.replace("networkTopologyScriptFileName", "#"),
            "placement.policy is 'region', which needs the racks",
            id="still lacking",
        ),
    ],
)
def test_what_is_not_translated_is_told_and_ends_with_1(
    java_file: Path, java: str, told: str
) -> None:
    java_file.write_text(java)

    result = CliRunner().invoke(config, ["import", str(java_file)])

    assert result.exit_code == 1
    assert told in result.output


@pytest.mark.parametrize(
    ("text", "uri"),
    [
        pytest.param("zkServers=a:1,b:2\n", "zk://a:1;b:2/ledgers", id="default root"),
        pytest.param(
            "zkServers=a:1\nzkLedgersRootPath=/bk/ledgers\n", "zk://a:1/bk/ledgers", id="own root"
        ),
        pytest.param("metadataServiceUri=zk://c:1/l\nzkServers=a:1\n", "zk://c:1/l", id="URI wins"),
        pytest.param(
            "metadataServiceUri=metadata-store:zk:a:1,b:2/c1\n",
            "metadata-store:zk:a:1",
            id="Java uses no more than the first server",
        ),
        pytest.param(
            "metadataServiceUri=metadata-store:zk:a:1;b:2/c1\n",
            "metadata-store:zk:a:1;b:2/c1",
            id="Pulsar's metadata driver",
        ),
    ],
)
def test_the_old_form_of_the_address_is_understood(java_file: Path, text: str, uri: str) -> None:
    java_file.write_text(text)

    assert translate(read_properties(java_file)).values["metadata_service_uri"][0] == uri


def test_an_address_that_java_cuts_off_is_told(java_file: Path) -> None:
    java_file.write_text("metadataServiceUri=metadata-store:zk:a:1,b:2/c1\n")

    result = CliRunner().invoke(config, ["import", str(java_file)])

    assert "before the comma. Write ; in: metadata-store:zk:a:1,b:2/c1\n" in result.stdout
    assert 'metadata_service_uri = "metadata-store:zk:a:1"\n' in result.stdout


def test_a_file_that_names_no_cluster_is_refused(java_file: Path) -> None:
    java_file.write_text("bookiePort=3181\n")

    with pytest.raises(SettingsError, match="neither metadataServiceUri nor zkServers"):
        translate(read_properties(java_file))


def test_the_table_names_our_settings() -> None:
    keys = {each.key for each in TRANSLATIONS.values() if each.key}

    assert keys <= set(setting_keys())
    named = re.findall(r"\b[a-z]+\.[a-z_]+\b", " ".join(t.note for t in TRANSLATIONS.values()))
    assert set(named) <= {*setting_keys(), "rules.yaml"}
