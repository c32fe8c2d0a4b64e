"""The settings: where they come from, which one wins, and the errors of wrong ones."""

from pathlib import Path

import pytest

from daemon.settings import Settings, load_settings
from ledgers.codec.layout import Layout
from ledgers.errors import SettingsError
from ledgers.secret import Secret
from tests.daemon.settings_given import URI, URI_LINE, VARIABLE, load, refused

# --- Sources --------------------------------------------------------------------------------------


def test_the_metadata_uri_alone_is_enough() -> None:
    settings = load_settings(None, {VARIABLE: URI})

    assert settings == Settings(metadata_service_uri=URI)
    assert settings.uri.root == "/ledgers"
    assert settings.uri.layout is Layout.HIERARCHICAL


def test_the_file_sets_what_the_environment_does_not(tmp_path: Path) -> None:
    text = URI_LINE + '[replication]\nledgers_at_once = 7\ntarget = "local"\n[log]\nlevel = "debug"'

    settings = load(tmp_path, text)

    assert settings.replication.ledgers_at_once == 7
    assert settings.replication.target == "local"
    assert settings.log.level == "debug"
    assert (
        settings.replication.retry_min_s
        == Settings(metadata_service_uri=URI).replication.retry_min_s
    )


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    assert load(tmp_path, "\ufeff" + URI_LINE).metadata_service_uri == URI


def test_a_setting_of_an_earlier_release_does_nothing(tmp_path: Path) -> None:
    text = URI_LINE + "[checks]\noverdue_after_s = 7\n"

    assert load(tmp_path, text, CHECKS_OVERDUE_AFTER_S="7") == load(tmp_path, URI_LINE)


def test_the_environment_wins(tmp_path: Path) -> None:
    text = URI_LINE + "[replication]\nledgers_at_once = 7\nretry_min_s = 3\n"

    settings = load(
        tmp_path, text, REPLICATION_LEDGERS_AT_ONCE="9", METADATA_SERVICE_URI="zk://zk9/other"
    )

    assert settings.replication.ledgers_at_once == 9
    assert settings.replication.retry_min_s == 3
    assert settings.uri.root == "/other"


def test_other_variables_of_the_environment_are_ignored() -> None:
    environment = {VARIABLE: URI, "PATH": "/bin", "bookmender_log_level": "?", "LOG_LEVEL": "?"}

    assert load_settings(None, environment) == Settings(metadata_service_uri=URI)


@pytest.mark.parametrize(
    ("variable", "text", "section", "name", "value"),
    [
        ("AUDITOR_ENABLED", "false", "auditor", "enabled", False),
        ("AUDITOR_ENABLED", "0", "auditor", "enabled", False),
        ("AUDITOR_ENABLED", "True", "auditor", "enabled", True),
        ("REPLICATION_RETRY_MIN_S", "2.5", "replication", "retry_min_s", 2.5),
        ("REPLICATION_RETRY_MIN_S", "2", "replication", "retry_min_s", 2.0),
        (
            "REPLICATION_READS_IN_FLIGHT_PER_BOOKIE",
            "500",
            "replication",
            "reads_in_flight_per_bookie",
            500,
        ),
        ("NODE_BOOKIE_ID", "10", "node", "bookie_id", "10"),
        ("REPLICATION_DEFAULT_PASSWORD", "", "replication", "default_password", Secret("")),
    ],
)
def test_variables_are_read_by_the_type_of_the_setting(
    tmp_path: Path, variable: str, text: str, section: str, name: str, value: object
) -> None:
    settings = load(tmp_path, **{variable: text})

    found = getattr(getattr(settings, section), name)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    "text", ["[replication]\nretry_min_s = 2\n", "replication.retry_min_s = 2"]
)
def test_whole_numbers_and_dotted_keys_are_accepted(tmp_path: Path, text: str) -> None:
    lines = text + "\n" + URI_LINE if text.startswith("replication.") else URI_LINE + text

    assert load(tmp_path, lines).replication.retry_min_s == 2.0


# --- Wrong types ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "key", "allowed"),
    [
        ("[replication]\nledgers_at_once = '7'", "replication.ledgers_at_once", "a whole number"),
        ("[replication]\nledgers_at_once = 7.5", "replication.ledgers_at_once", "a whole number"),
        ("[replication]\nledgers_at_once = true", "replication.ledgers_at_once", "a whole number"),
        ("[replication]\nretry_min_s = 'x'", "replication.retry_min_s", "a number"),
        ("[replication]\nretry_min_s = [1]", "replication.retry_min_s", "a number"),
        ("[auditor]\nenabled = 'no'", "auditor.enabled", "true or false"),
        ("[auditor]\nenabled = 1", "auditor.enabled", "true or false"),
        ("[node]\nbookie_id = 5", "node.bookie_id", "a text"),
        ("[node]\nbookie_id = 1979-05-27", "node.bookie_id", "a text"),
    ],
)
def test_a_value_of_a_wrong_type_in_the_file_is_refused(
    tmp_path: Path, line: str, key: str, allowed: str
) -> None:
    message = refused(tmp_path, URI_LINE + line)

    assert message.startswith(f"{tmp_path / 'bookmender.toml'}: {key} is ")
    assert message.endswith(f"; allowed: {allowed}")


@pytest.mark.parametrize(
    ("variable", "value", "key", "allowed"),
    [
        ("REPLICATION_LEDGERS_AT_ONCE", "many", "replication.ledgers_at_once", "a whole number"),
        ("REPLICATION_LEDGERS_AT_ONCE", "", "replication.ledgers_at_once", "a whole number"),
        ("REPLICATION_RETRY_MIN_S", "1,5", "replication.retry_min_s", "a number"),
        ("AUDITOR_ENABLED", "maybe", "auditor.enabled", "true or false"),
    ],
)
def test_a_value_of_a_wrong_type_names_its_variable(
    tmp_path: Path, variable: str, value: str, key: str, allowed: str
) -> None:
    message = refused(tmp_path, **{variable: value})

    assert message == (
        f"environment variable BOOKMENDER_{variable}: {key} is {value!r}; allowed: {allowed}"
    )


def test_a_password_is_never_quoted(tmp_path: Path) -> None:
    message = refused(tmp_path, URI_LINE + "[replication]\ndefault_password = 4711\n")

    assert "replication.default_password" in message
    assert message.endswith("allowed: a text")
    assert "4711" not in message


# --- Wrong values ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "[replication]\nledgers_at_once = 0",
            "replication.ledgers_at_once is 0; allowed: 1 to 10000",
        ),
        (
            "[replication]\nledgers_at_once = 10001",
            "replication.ledgers_at_once is 10001; allowed: 1 to 10000",
        ),
        (
            "[replication]\nopen_ledger_grace_s = -1",
            "replication.open_ledger_grace_s is -1.0; allowed: 0 to 86400",
        ),
        (
            "[replication]\nretry_min_s = 20\nretry_max_s = 10",
            "replication.retry_max_s is 10.0; allowed: 20 to 86400",
        ),
        (
            "[replication]\nidle_wait_s = nan",
            "replication.idle_wait_s is nan; allowed: 0.05 to 3600",
        ),
        (
            "[replication]\ntarget = 'near'",
            "replication.target is 'near'; allowed: placement, local",
        ),
        (
            "[replication]\ndefault_digest_type = 'crc32'",
            "replication.default_digest_type is 'crc32'; allowed: CRC32, HMAC, CRC32C, DUMMY",
        ),
        (
            "[replication]\nreads_in_flight_per_bookie = 501",
            "replication.reads_in_flight_per_bookie is 501; allowed: 1 to 500",
        ),
        (
            "[auditor]\nlost_bookie_recovery_delay_s = -1",
            "auditor.lost_bookie_recovery_delay_s is -1; allowed: 0 to 604800",
        ),
        (
            "[auditor]\nbookie_check_interval_s = 0",
            "auditor.bookie_check_interval_s is 0.0; allowed: 1 to 31622400",
        ),
        (
            "[zookeeper]\nsession_timeout_s = 601",
            "zookeeper.session_timeout_s is 601.0; allowed: 1 to 600",
        ),
        (
            "[zookeeper]\nconnect_timeout_s = 0",
            "zookeeper.connect_timeout_s is 0.0; allowed: 0.5 to 600",
        ),
        ("[node]\nnice = -1", "node.nice is -1; allowed: 0 to 19"),
        ("[node]\nnice = 20", "node.nice is 20; allowed: 0 to 19"),
        (
            "[node]\nstate_dir = 'state'",
            "node.state_dir is 'state'; allowed: an absolute path, as in /var/lib/bookmender",
        ),
        (
            "[node]\nstate_dir = '~/state'",
            "node.state_dir is '~/state'; allowed: an absolute path, as in /var/lib/bookmender",
        ),
        (
            "[placement]\nracks_file = 'racks'",
            "placement.racks_file is 'racks'; allowed: an absolute path, as in "
            "/etc/bookmender/racks",
        ),
        ("[log]\nlevel = 'loud'", "log.level is 'loud'; allowed: debug, info, warning, error"),
        ("[log]\nformat = 'xml'", "log.format is 'xml'; allowed: auto, text, json"),
    ],
)
def test_a_value_out_of_range_is_reported_with_the_range(
    tmp_path: Path, line: str, message: str
) -> None:
    assert refused(tmp_path, URI_LINE + line) == f"{tmp_path / 'bookmender.toml'}: {message}"


def test_a_value_out_of_range_names_its_variable(tmp_path: Path) -> None:
    message = refused(tmp_path, URI_LINE + "[log]\nlevel = 'info'", LOG_LEVEL="loud")

    assert message.startswith("environment variable BOOKMENDER_LOG_LEVEL: log.level is 'loud'")


@pytest.mark.parametrize("is_in_file", [True, False])
def test_a_conflict_with_a_default_names_the_setting(tmp_path: Path, is_in_file: bool) -> None:
    if is_in_file:
        message = refused(tmp_path, URI_LINE + "[replication]\nretry_min_s = 600\n")
    else:
        message = refused(tmp_path, REPLICATION_RETRY_MIN_S="600")

    source = tmp_path / "bookmender.toml"
    if not is_in_file:
        source = Path("environment variable BOOKMENDER_REPLICATION_RETRY_MIN_S")
    assert message == (
        f"{source}: replication.retry_max_s is 300.0; allowed: 600 to 86400; "
        "that is its default: set it, too"
    )


# --- The metadata URI -----------------------------------------------------------------------------


def test_without_a_metadata_uri_the_error_says_how_to_set_it() -> None:
    with pytest.raises(SettingsError, match=f"{VARIABLE}=zk") as caught:
        load_settings(None, {})

    assert caught.value.setting == "metadata_service_uri"


@pytest.mark.parametrize(
    ("uri", "what"),
    [
        ("127.0.0.1:2181", "must begin with zk://"),
        ("etcd://host/ledgers", "is not supported"),
        ("zk+round://host/ledgers", "its layout must be one of"),
        ("zk://host:99999/ledgers", "the port of 'host:99999' is not between 1 and 65535"),
        ("zk://host", "its path must be that of the ledgers root"),
        ("zk:///ledgers", "is not a host"),
    ],
)
def test_a_malformed_metadata_uri_is_reported_with_an_example(
    tmp_path: Path, uri: str, what: str
) -> None:
    message = refused(tmp_path, f'metadata_service_uri = "{uri}"\n')

    assert message.startswith(f"{tmp_path / 'bookmender.toml'}: ")
    assert what in message
    assert "zk+hierarchical://host1:2181;host2:2181/ledgers" in message


# --- The file -------------------------------------------------------------------------------------


def test_a_file_that_is_not_toml_is_reported_with_the_line(tmp_path: Path) -> None:
    message = refused(tmp_path, URI_LINE + "[replication\n")

    assert message.startswith(f"{tmp_path / 'bookmender.toml'}: is not TOML: ")
    assert "line 2" in message


def test_a_file_that_is_not_text_is_not_toml_either(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_bytes(b"\xff\xfe")

    with pytest.raises(SettingsError, match="is not TOML"):
        load_settings(tmp_path / "x.toml", {})


@pytest.mark.parametrize("name", ["missing.toml", "."])
def test_a_file_that_cannot_be_read_is_reported(tmp_path: Path, name: str) -> None:
    with pytest.raises(SettingsError, match="cannot be read: ") as caught:
        load_settings(tmp_path / name, {})

    assert str(tmp_path / name) in str(caught.value)
