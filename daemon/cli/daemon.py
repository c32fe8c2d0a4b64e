"""``bookmender daemon``."""

import os
import sys
from pathlib import Path

import click
import structlog

from daemon.cli.main import config_option
from daemon.logs import set_up_logs
from daemon.node import run_node
from daemon.settings import ENVIRONMENT_PREFIX, load_settings, service_variables

log = structlog.get_logger()


@click.command()
@config_option
def daemon(config: Path | None) -> None:
    """Run one node until SIGTERM or Ctrl-C.

    It stands for election as auditor (the leader marks what is lost) and repairs marked ledgers,
    side by side with other nodes and with Java's AutoRecovery. Any setting can be given in the
    environment: open_ledger_grace_s of [replication] is BOOKMENDER_REPLICATION_OPEN_LEDGER_GRACE_S.

    Exits 0 when it was stopped, 1 when some of it did not end in time, 2 when a setting or the
    state directory is wrong, 3 when no ZooKeeper answers or there is no cluster in it.
    """
    settings = load_settings(config, os.environ)
    set_up_logs(settings.log)
    if ignored := service_variables(os.environ, prefix=ENVIRONMENT_PREFIX):
        log.debug("environment.ignored", variables=ignored, reason="a Service of Kubernetes")
    sys.exit(run_node(settings))
