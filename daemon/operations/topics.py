"""The topic that a ledger belongs to, from the custom metadata of its application.

Pulsar stores the name of the topic in one of ``TOPIC_KEYS`` (its class ``LedgerMetadataUtils``).
Pravega and HerdDB store a name of their own; for others all their custom metadata is shown.
"""

from collections.abc import Sequence
from typing import NamedTuple
from urllib.parse import unquote_plus

from ledgers.placement.pulsar import CONFIG_KEY

ENCODED_KEYS = ("pulsar/managed-ledger", "pulsar/schemaId")
"""Their last part is encoded as in a URL."""
TOPIC_KEYS = (*ENCODED_KEYS, "pulsar/compactedTopic", "pulsar/delayedIndexTopic")
NAME_KEYS = ("BookKeeperLogId", "tablespacename")
"""Names of a log of Pravega, and of a tablespace of HerdDB."""
DOMAIN = "persistent://"
NAME_LENGTH_MAX = 300


class Topic(NamedTuple):
    """``name``: ``tenant/namespace/topic``, or else ``key=value``. ``tenant``: None outside of
    Pulsar."""

    name: str
    tenant: str | None = None


NONE = Topic("")


def topic_of(custom: Sequence[tuple[str, bytes]]) -> Topic:
    """Return the topic of a ledger with this custom metadata; ``NONE`` without any."""
    texts = {k: v[:NAME_LENGTH_MAX].decode(errors="replace") for k, v in custom if k != CONFIG_KEY}
    for key in TOPIC_KEYS:
        if name := texts.get(key):
            return _of_pulsar(name, is_encoded=key in ENCODED_KEYS)
    told = [key for key in NAME_KEYS if key in texts] or sorted(texts)
    return Topic(", ".join(f"{key}={texts[key]}" for key in told)[:NAME_LENGTH_MAX])


def _of_pulsar(name: str, *, is_encoded: bool) -> Topic:
    """Return the topic of ``tenant/namespace/persistent/topic``, with a cluster after the tenant in
    Pulsar's old form, or of ``persistent://tenant/namespace/topic``."""
    parts = name.removeprefix(DOMAIN).split("/")
    if len(parts) > 3 and parts[-2] == "persistent":
        del parts[-2]
    if is_encoded:
        parts[-1] = unquote_plus(parts[-1], errors="replace")
    return Topic("/".join(parts), parts[0] if len(parts) > 1 else None)
