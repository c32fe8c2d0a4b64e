"""Which cluster this is: BookKeeper gives each a UUID when it is formatted, and its cookies carry
it."""

from ledgers.errors import NoNodeError
from ledgers.store import MetadataStore


async def read_instance_id(store: MetadataStore, root: str) -> str | None:
    """None for a cluster that has none, as Java allows."""
    try:
        data, _ = await store.get(f"{root}/INSTANCEID")
    except NoNodeError:
        return None
    return data.decode(errors="replace").strip() or None
