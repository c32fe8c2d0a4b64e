"""Opens a ZooKeeper session with the settings' servers and time-outs, for nodes and commands.

A module of its own, because a command needs a session but not the rest of ``daemon.session``.
"""

from daemon.settings import Settings
from ledgers.errors import SecureConnectionError, UnavailableError
from ledgers.zookeeper.store import ZooKeeperStore


async def open_store(settings: Settings, *, ends_with_loop: bool = False) -> ZooKeeperStore:
    """Open a session. ``ends_with_loop``: see ``ZooKeeperStore.open``.

    Raises UnavailableError that names the servers and the setting they come from, SettingsError if
    a file of ``[security]`` cannot be used, UnauthorizedError if ZooKeeper refuses our credentials.
    """
    try:
        return await ZooKeeperStore.open(
            settings.uri.hosts,
            session_timeout_s=settings.zookeeper.session_timeout_s,
            connect_timeout_s=settings.zookeeper.connect_timeout_s,
            security=settings.security,
            ends_with_loop=ends_with_loop,
            request_bytes_max=settings.zookeeper.request_bytes_max,
        )
    except SecureConnectionError:  # its message names the next step
        raise
    except UnavailableError as error:
        raise UnavailableError(
            f"{error.args[0]}: do the servers run, is metadata_service_uri right, and does its "
            f"port take connections {'with' if settings.security.zookeeper_tls else 'without'} "
            "TLS (security.zookeeper_tls)?",
            **error.context,
        ) from error
