"""The instance id of a cluster: a UUID that BookKeeper creates when it formats the cluster. Cookies
contain it."""

from ledgers.errors import NoNodeError
from ledgers.store import MetadataStore


async def read_instance_id(store: MetadataStore, root: str) -> str | None:
    """Return the instance id; None if the cluster has none, which Java allows."""
    try:
        data, _ = await store.get(f"{root}/INSTANCEID")
    except NoNodeError:
        return None
    return data.decode(errors="replace").strip() or None
