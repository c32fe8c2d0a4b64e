"""Environment variables that Kubernetes sets for the Services of a pod's namespace.

A Service named ``bookmender``, or ``bookmender-…``, shares the prefix of our settings. The kubelet
writes these variables (``pkg/kubelet/envvars`` of Kubernetes) into every pod that keeps
``enableServiceLinks``. Both the name and the value must have the shape that the kubelet writes, so
that a mistyped setting is still refused.
"""

import ipaddress
import re
from collections.abc import Callable, Mapping

PORT_MAX = 65_535


def service_variables(environment: Mapping[str, str], *, prefix: str) -> tuple[str, ...]:
    """Return the names below ``prefix`` that Kubernetes set, sorted."""
    return tuple(
        sorted(
            name
            for name, value in environment.items()
            if name.startswith(prefix) and is_of_service(name, value)
        )
    )


def is_of_service(name: str, value: str, *, is_setting: bool = False) -> bool:
    """Return whether Kubernetes writes such a variable, with such a value, for a Service.

    ``is_setting``: a setting has this name, too. A port's number or an address may then be what the
    operator gave, but no setting takes the URL of a Service.
    """
    return any(
        name_shape.fullmatch(name) and is_value(value)
        for name_shape, is_value in _SHAPES
        if is_value is _is_url or not is_setting
    )


def _is_url(value: str) -> bool:
    """``tcp://10.96.0.7:8080``, ``udp://[fd00::7]:53``."""
    found = re.fullmatch(r"(?:tcp|udp|sctp)://(?:\[([^\]]+)\]|([^:\[\]]+)):([0-9]+)", value)
    return bool(found and _is_address(found[1] or found[2]) and _is_port(found[3]))


def _is_address(value: str) -> bool:
    try:
        ipaddress.ip_address(value)
    except ValueError:
        return False
    return True


def _is_port(value: str) -> bool:
    return bool(re.fullmatch("[0-9]{1,5}", value)) and 0 < int(value) <= PORT_MAX


def _is_protocol(value: str) -> bool:
    return value in ("tcp", "udp", "sctp")


_OF_PORT = "_PORT_[0-9]{1,5}_(?:TCP|UDP|SCTP)"
_SHAPES: tuple[tuple[re.Pattern[str], Callable[[str], bool]], ...] = tuple(
    (re.compile(f"[A-Z0-9_]+{ending}"), is_value)
    for ending, is_value in (
        # A name may fit two shapes: BOOKMENDER_SERVICE_PORT is a number for the Service
        # ``bookmender``, and a URL for the Service ``bookmender-service``.
        ("_SERVICE_HOST", _is_address),
        ("_SERVICE_PORT(?:_[A-Z0-9_]+)?", _is_port),
        (_OF_PORT, _is_url),
        (f"{_OF_PORT}_PROTO", _is_protocol),
        (f"{_OF_PORT}_PORT", _is_port),
        (f"{_OF_PORT}_ADDR", _is_address),
        ("_PORT", _is_url),
    )
)
"""Names, by their ending, and the shape of their values."""
