"""Opens a ZooKeeper session with the settings' servers and time-outs, for nodes and commands.

A module of its own, because a command needs a session but not the rest of ``daemon.session``.
"""

from daemon.settings import Settings
from ledgers.errors import UnavailableError
from ledgers.zookeeper.store import ZooKeeperStore


async def open_store(settings: Settings, *, ends_with_loop: bool = False) -> ZooKeeperStore:
    """Open a session. ``ends_with_loop``: see ``ZooKeeperStore.open``.

    Raises UnavailableError that names the servers and the setting they come from.
    """
    try:
        return await ZooKeeperStore.open(
            settings.uri.hosts,
            session_timeout_s=settings.zookeeper.session_timeout_s,
            connect_timeout_s=settings.zookeeper.connect_timeout_s,
            ends_with_loop=ends_with_loop,
            request_bytes_max=settings.zookeeper.request_bytes_max,
        )
    except UnavailableError as error:
        raise UnavailableError(
            f"{error.args[0]}: do the servers run, and is metadata_service_uri right?",
            **error.context,
        ) from error
