"""Settings of secured servers that only tests use."""

from collections.abc import Mapping
from dataclasses import asdict

from daemon.local.security import ROLE
from ledgers.security import OPEN, SecuritySettings

PASSWORD = "not, told=to-anybody"
"""With characters that DIGEST-MD5 must quote."""
BOOKIE_ROLES = {
    "bookieAuthProviderFactoryClass": "org.apache.bookkeeper.tls.BookieAuthZFactory",
    "authorizedRoles": ROLE,
}


def as_environment(settings: SecuritySettings) -> Mapping[str, str]:
    """The settings that differ from the defaults, as variables without the prefix."""
    return {
        f"SECURITY_{name.upper()}": str(value).lower() if isinstance(value, bool) else value
        for name, value in asdict(settings).items()
        if value != getattr(OPEN, name)
    }
