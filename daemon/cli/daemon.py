"""``bookmender daemon``: runs a node."""

import faulthandler
import os
import sys
from pathlib import Path

import click
import structlog

from daemon.cli.main import config_option
from daemon.logs import LogThread, set_up_logs
from daemon.node import run_node
from daemon.settings import ENVIRONMENT_PREFIX, RETIRED, service_variables
from daemon.settings_source import find_source

log = structlog.get_logger()


@click.command()
@config_option
def daemon(config: Path | None) -> None:
    """Run a node until SIGTERM or Ctrl-C.

    The node stands for election as auditor and repairs marked ledgers. The elected auditor marks
    the ledgers of lost bookies. Nodes work beside each other and beside Java's AutoRecovery.

    SIGHUP reads the settings file again. The log event settings.restart_needed names changed
    settings that only a restart puts in force.

    Each setting can also be given in the environment. For example, open_ledger_grace_s of
    [replication] is BOOKMENDER_REPLICATION_OPEN_LEDGER_GRACE_S.

    Exit codes: 0 stopped. 1 a service did not stop in time. 2 a setting or the state directory is
    wrong. 3 ZooKeeper does not answer, or it holds no such cluster.
    """
    faulthandler.enable(2)  # systemd's watchdog aborts: the log then shows where each thread is
    source = find_source(config, os.environ)
    settings, sources = source.load_with_sources()
    with LogThread():
        set_up_logs(settings.log)
        log.info("settings.read", metadata_service_uri_from=sources["metadata_service_uri"])
        for key in sorted(RETIRED & sources.keys()):
            log.warning("setting.has_no_effect", setting=key, source=sources[key])
        if ignored := service_variables(os.environ, prefix=ENVIRONMENT_PREFIX):
            log.debug("environment.ignored", variables=ignored, reason="a Service of Kubernetes")
        code = run_node(settings, read_settings=source.load)
    sys.exit(code)
