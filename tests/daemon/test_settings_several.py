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
        (
            "[zookeeper]\ntimeout = 1",
            "zookeeper.session_timeout_s or zookeeper.connect_timeout_s or",
        ),
        ("xyzzy = 1", "deploy/bookmender.toml lists all"),
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
        ("URI", "did you mean BOOKMENDER_METADATA_SERVICE_URI?"),
        ("XYZZY", "deploy/bookmender.toml lists all"),
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
        pytest.param("[nosuch]\nenabled = true\nshare = 1", "there are [node], [zook", id="far"),
        pytest.param("[nosuch]", "there are [node], [zook", id="empty"),
        pytest.param("[nosuch.hold]\nshare = 1", "there are [node], [zook", id="a table in it"),
    ],
)
def test_an_unknown_table_gets_a_suggestion_or_all_tables(
    tmp_path: Path, text: str, told: str
) -> None:
    [message] = refused(tmp_path, URI_LINE + text).splitlines()

    name = text.partition("]")[0].partition(".")[0]
    assert message.startswith(f"{tmp_path / 'bookmender.toml'}: there is no table {name}]; {told}")
    assert "hold." not in message
    assert message.endswith("deploy/bookmender.toml lists all")


@pytest.mark.parametrize("name", ["xyzzy", "retry", "checks.enabled", "zookeeper.timeout"])
def test_an_unfamiliar_name_gets_few_suggestions(tmp_path: Path, name: str) -> None:
    message = refused(tmp_path, f"{name} = 1\n{URI_LINE}")

    assert message.count("_") < 20
    assert len(message) < 300


# --- Several at once ------------------------------------------------------------------------------


def test_all_errors_are_reported_at_once(tmp_path: Path) -> None:
    wrong = "[replication]\nledgers_at_once = 0\nidle_wait_s = nan\nretry_min_s = 'x'\nmore = 1"

    first, *told = refused(tmp_path, URI_LINE + wrong, LOG_LEVEL="?", LOG_FORMAT="xml").splitlines()

    assert first == "6 settings are wrong"
    names = "retry_min_s is 'x'", "replication.more", "at_once is 0", "wait_s is nan", "xml", "'?'"
    assert all(name in line for name, line in zip(names, told, strict=True))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (URI_LINE + "[placement]\npolicy = 'zone'\nracks_file = 'x'", "racks_file is 'x'; allowed"),
        ("metadata_service_uri = 5", "metadata_service_uri is 5; allowed: a text"),
    ],
    ids=["a rule that depends on it", "it counts as not set"],
)
def test_an_error_that_follows_from_another_is_not_reported(
    tmp_path: Path, text: str, complaint: str
) -> None:
    [line] = refused(tmp_path, text).splitlines()

    assert complaint in line


@pytest.mark.parametrize(
    "ruled_out",
    ["retry_min_s = 600", "retry_min_s = 600\nretry_max_s = 100000", "retry_max_s = 5"],
    ids=["a default", "a default in place of a wrong one", "a value, by a default"],
)
def test_a_conflict_hides_no_other_error_of_its_section(tmp_path: Path, ruled_out: str) -> None:
    wrong = f"[replication]\n{ruled_out}\nidle_wait_s = 0\ntarget = 'near'"

    first, *told = refused(tmp_path, URI_LINE + wrong, LOG_LEVEL="loud").splitlines()

    assert first == "4 settings are wrong"
    names = "retry_max_s is", "idle_wait_s is 0.0", "target is 'near'", "log.level is 'loud'"
    assert all(name in line for name, line in zip(names, told, strict=True))
