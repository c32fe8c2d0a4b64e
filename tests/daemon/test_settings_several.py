"""Unknown settings, and several wrong settings at once."""

from pathlib import Path

import pytest

from tests.daemon.settings_given import URI_LINE, refused

# --- Names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("[replication]\nledger_at_once = 1", "did you mean replication.ledgers_at_once?"),
        ("[auditor]\nrecovery_delay_s = 1", "did you mean auditor.lost_bookie_recovery_delay_s?"),
        ("[zookeeper]\ntimeout = 1", "did you mean zookeeper."),
        ("xyzzy = 1", "bookmender config show lists all"),
        ("[auditor.more]\nenabled = true", "there is no setting auditor.more"),
        ("[[auditor]]\nenabled = true", "there is no setting auditor: it is a section, [auditor]"),
        ("auditor = 3", "there is no setting auditor: it is a section, [auditor]"),
    ],
)
def test_an_unknown_name_in_the_file_gets_a_suggestion(
    tmp_path: Path, line: str, hint: str
) -> None:
    message = refused(tmp_path, URI_LINE + line)

    assert message.startswith(f"{tmp_path / 'bookmender.toml'}: there is no setting ")
    assert hint in message


@pytest.mark.parametrize(
    ("variable", "hint"),
    [
        ("LOG_LEVL", "did you mean BOOKMENDER_LOG_LEVEL?"),
        ("SERVICE_URI", "did you mean BOOKMENDER_METADATA_SERVICE_URI?"),
        ("XYZZY", "bookmender config show lists all"),
    ],
)
def test_an_unknown_variable_gets_a_suggestion(tmp_path: Path, variable: str, hint: str) -> None:
    message = refused(tmp_path, **{variable: "x"})

    assert message.startswith(f"environment: there is no setting BOOKMENDER_{variable}; ")
    assert hint in message


@pytest.mark.parametrize(
    ("text", "told"),
    [
        pytest.param("[replicaton]\nledgers_at_once = 1", "did you mean [replication]?", id="near"),
        pytest.param("[Auditor]\nenabled = true", "did you mean [auditor]?", id="in capitals"),
        pytest.param("[xyzzy]\nenabled = true\nshare = 1", "", id="far"),
        pytest.param("[xyzzy]", "", id="empty"),
        pytest.param("[xyzzy.hold]\nshare = 1", "", id="a table in it"),
    ],
)
def test_an_unknown_table_gets_one_error(tmp_path: Path, text: str, told: str) -> None:
    [message] = refused(tmp_path, URI_LINE + text).splitlines()

    name = text.partition("]")[0].partition(".")[0]
    assert message.startswith(f"{tmp_path / 'bookmender.toml'}: there is no table {name}]; {told}")
    assert "hold." not in message
    assert message.endswith("bookmender config show lists all")


# --- Several at once ------------------------------------------------------------------------------


def test_all_wrong_names_and_types_are_reported_at_once(tmp_path: Path) -> None:
    wrong = "[replication]\nledgers_at_once = 0\nretry_min_s = 'x'\nmore = 1"

    first, *told = refused(tmp_path, URI_LINE + wrong, AUDITOR_ENABLED="?", LOG_X="1").splitlines()

    assert first == "4 settings are wrong"
    names = "retry_min_s is 'x'", "replication.more", "auditor.enabled is '?'", "BOOKMENDER_LOG_X"
    assert all(name in line for name, line in zip(names, told, strict=True))


def test_the_first_wrong_value_of_each_section_is_reported(tmp_path: Path) -> None:
    wrong = "[replication]\nledgers_at_once = 0\nidle_wait_s = nan"

    first, *told = refused(tmp_path, URI_LINE + wrong, LOG_LEVEL="?").splitlines()

    assert first == "2 settings are wrong"
    names = "at_once is 0", "log.level is '?'"
    assert all(name in line for name, line in zip(names, told, strict=True))


def test_an_error_that_follows_from_another_is_not_reported(tmp_path: Path) -> None:
    [line] = refused(tmp_path, "metadata_service_uri = 5").splitlines()

    assert "metadata_service_uri is 5; allowed: a text" in line
