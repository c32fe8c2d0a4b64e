"""The paths of the server: who may use them, and what they take and answer.

``app`` has a handler for each name, and ``openapi`` describes them from here. So a path exists if
and only if it is described.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from daemon.cli.option_types import DURATION_PATTERN
from daemon.http import records
from replication import history

HISTORY_DEFAULT_S = 86_400
HISTORY_MAX_S = 7 * 86_400
"""How far ``/api/v1/history`` looks back. The texts of its parameter say the same."""
EVENTS_MAX = 1_000
"""Events in one answer."""
DELAY_MAX_S = 2**31 - 1
"""Longest recovery delay: Java's int."""


class Kind(enum.Enum):
    """The kind of an endpoint. The values are labels of metrics and tags of the description."""

    METRICS = "metrics"
    HEALTH = "health"
    API = "api"
    JAVA = "java"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A parameter of the query, or of the path (``in_path``)."""

    name: str
    about: str
    schema: Mapping[str, Any]
    is_required: bool = False
    in_path: bool = False


BOOKIE = Parameter(
    name="bookie",
    about="Bookie ID, for example 10.0.0.1:3181",
    schema={"type": "string", "pattern": "^[A-Za-z0-9:._-]+$"},
    is_required=True,
    in_path=True,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One method of one path.

    ``answers``: by status code, the type of the JSON answer, ``str`` for a text, or a schema.
    ``body``: the type or the schema of the request's JSON, which may be missing unless it has
    required keys.
    ``changes``: it changes the cluster, and needs the token. The errors that all endpoints of
    ``/api`` have are added by ``openapi``.
    """

    name: str
    method: str
    path: str
    kind: Kind
    about: str
    answers: Mapping[int, Any]
    parameters: tuple[Parameter, ...] = ()
    body: Any = None
    changes: bool = False

    @property
    def is_body_required(self) -> bool:
        if isinstance(self.body, Mapping):
            return bool(self.body.get("required"))
        return self.body is not None and any(
            key.required for key in msgspec.structs.fields(self.body)
        )


def _read(name: str, path: str, about: str, answer: type, *parameters: Parameter) -> Endpoint:
    return Endpoint(
        name=name,
        method="GET",
        path=f"/api/v1/{path}",
        kind=Kind.API,
        about=about,
        answers={200: answer},
        parameters=parameters,
    )


def _change(
    name: str,
    method: str,
    path: str,
    about: str,
    answer: type,
    *parameters: Parameter,
    body: Any = None,
) -> Endpoint:
    return Endpoint(
        name=name,
        method=method,
        path=f"/api/v1/{path}",
        kind=Kind.API,
        about=about,
        answers={200: answer},
        parameters=(BOOKIE, *parameters) if "{bookie}" in path else parameters,
        body=body,
        changes=True,
    )


IDS: dict[str, Any] = {"type": "array", "items": {"type": "integer"}}
MISSING: dict[str, Any] = {
    "type": "object",
    "additionalProperties": {"type": "array", "items": {"type": "string"}},
}
ENABLED: dict[str, Any] = {
    "type": "object",
    "properties": {"enabled": {"type": "boolean"}},
    "required": ["enabled"],
    "additionalProperties": False,
}
HOST_NAMES: dict[str, Any] = {
    "type": "object",
    "additionalProperties": {"type": ["string", "null"]},
}
DELAY: dict[str, Any] = {
    "type": "object",
    "properties": {"delay_seconds": {"type": "integer", "minimum": 0, "maximum": DELAY_MAX_S}},
    "required": ["delay_seconds"],
}
DECOMMISSION: dict[str, Any] = {
    "type": "object",
    "properties": {
        "bookie_src": BOOKIE.schema,
        "delete_cookie": {"enum": ["true", "false", True, False]},
    },
    "required": ["bookie_src"],
}


RECOVER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "bookie_src": {"type": "array", "items": BOOKIE.schema, "minItems": 1, "maxItems": 100},
        "bookie_dest": {"type": "array", "description": "Ignored: the placement policy chooses"},
        "delete_cookie": {"enum": ["true", "false", True, False]},
    },
    "required": ["bookie_src"],
}


def _java(
    name: str,
    path: str,
    about: str,
    answers: Mapping[int, Any],
    *,
    method: str = "GET",
    parameters: tuple[Parameter, ...] = (),
    body: Any = None,
) -> Endpoint:
    return Endpoint(
        name=name,
        method=method,
        path=f"/api/v1/{path}",
        kind=Kind.JAVA,
        about=about,
        answers=answers,
        parameters=parameters,
        body=body,
        changes=method == "PUT",
    )


def _option(name: str, about: str, **schema: Any) -> Parameter:
    return Parameter(name=name, about=about, schema=schema or {"type": "string"})


ENDPOINTS = (
    Endpoint(
        name="metrics",
        method="GET",
        path="/metrics",
        kind=Kind.METRICS,
        about="Metrics of this node for Prometheus, as text or OpenMetrics",
        answers={200: str},
    ),
    Endpoint(
        name="healthz",
        method="GET",
        path="/healthz",
        kind=Kind.HEALTH,
        about="The process lives: the event loop of each role answers",
        answers={200: records.HealthRecord, 503: records.HealthRecord},
    ),
    Endpoint(
        name="readyz",
        method="GET",
        path="/readyz",
        kind=Kind.HEALTH,
        about="Each role has a ZooKeeper session and does its work",
        answers={200: records.HealthRecord, 503: records.HealthRecord},
    ),
    _read("openapi", "openapi.json", "This description", dict),
    _read("node", "node", "This node and its roles", records.NodeRecord),
    _read("status", "status", "As bookmender status -o json", records.StatusRecord),
    _read("conditions", "conditions", "Health and conditions", records.ConditionsRecord),
    _read("blocked", "blocked", "Ledgers that need help, and why", records.BlockedRecord),
    _read("bookies", "bookies", "As bookmender bookie list -o json", records.BookiesRecord),
    _read("queue", "queue", "As bookmender queue list -o json", records.QueueRecord),
    _read("checks", "checks", "As bookmender check list -o json", records.ChecksRecord),
    _read("hold", "hold", "As bookmender hold show -o json", records.HoldStateRecord),
    _read(
        "history",
        "history",
        "As bookmender history -o json",
        records.HistoryRecord,
        _option(
            "since",
            "How far to look back: 30m, 2h, 7d. At most 7d",
            type="string",
            pattern=f"^{DURATION_PATTERN}$",
            default="24h",
        ),
        _option(
            "kind",
            "Only these events. May be repeated",
            type="array",
            items={"type": "string", "enum": [kind.value for kind in history.Kind]},
        ),
        _option(
            "limit",
            "Events in the answer, the last ones of the period",
            type="integer",
            minimum=1,
            maximum=EVENTS_MAX,
            default=EVENTS_MAX,
        ),
    ),
    _change(
        "begin_hold",
        "POST",
        "hold",
        "Begin a safety hold, or replace the present one",
        records.HoldStateRecord,
        body=records.HoldOrderRecord,
    ),
    _change(
        "end_hold",
        "DELETE",
        "hold",
        "End the safety hold",
        records.HoldStateRecord,
        _option(
            "accept_lost",
            "true: end it although bookies are absent, which then count as lost",
            type="boolean",
        ),
    ),
    _change(
        "disable", "POST", "disable", "Disable auto-recovery, Java's too", records.SwitchRecord
    ),
    _change("enable", "POST", "enable", "Enable auto-recovery again", records.SwitchRecord),
    _change(
        "begin_drain",
        "PUT",
        "bookies/{bookie}/drain",
        "Move all copies off a running bookie",
        records.ChangedRecord,
        body=records.DrainOrderRecord,
    ),
    _change(
        "end_drain",
        "DELETE",
        "bookies/{bookie}/drain",
        "Withdraw the drain. Moved copies stay moved",
        records.ChangedRecord,
    ),
    _change(
        "begin_maintenance",
        "PUT",
        "bookies/{bookie}/maintenance",
        "Let a bookie be absent for a while without copying",
        records.ChangedRecord,
        body=records.MaintenanceOrderRecord,
    ),
    _change(
        "end_maintenance",
        "DELETE",
        "bookies/{bookie}/maintenance",
        "End the maintenance window",
        records.ChangedRecord,
    ),
    _java("java_status", "autorecovery/status", "Is auto-recovery enabled?", {200: ENABLED}),
    _java(
        "java_set_status",
        "autorecovery/status",
        "Enable or disable auto-recovery",
        {200: ENABLED, 400: str},
        method="PUT",
        parameters=(
            Parameter(
                name="enabled",
                about="true or false",
                schema={"type": "string", "enum": ["true", "false"]},
                is_required=True,
            ),
        ),
    ),
    _java(
        "java_list_marked",
        "autorecovery/list_under_replicated_ledger",
        "Marked ledgers; with printmissingreplica an object of their missing bookies",
        {200: {"oneOf": [IDS, MISSING]}, 404: str},
        parameters=(
            _option("missingreplica", "Only ledgers that miss this bookie"),
            _option("excludingmissingreplica", "Only ledgers that do not miss this bookie"),
            _option("printmissingreplica", "Present: also list the missing bookies"),
        ),
    ),
    _java("java_auditor", "autorecovery/who_is_auditor", "The leader", {200: str, 404: str}),
    _java(
        "java_trigger_audit",
        "autorecovery/trigger_audit",
        "Audit now, and treat absent bookies as lost",
        {200: str, 404: str},
        method="PUT",
    ),
    _java(
        "java_delay",
        "autorecovery/lost_bookie_recovery_delay",
        "The recovery delay",
        {200: str, 404: str},
    ),
    _java(
        "java_set_delay",
        "autorecovery/lost_bookie_recovery_delay",
        "Set the recovery delay",
        {200: str},
        method="PUT",
        body=DELAY,
    ),
    _java(
        "java_decommission",
        "autorecovery/decommission",
        "Have the ledgers of a stopped bookie copied; with delete_cookie, then delete its cookie",
        {200: str, 404: str},
        method="PUT",
        body=DECOMMISSION,
    ),
    _java(
        "java_recover",
        "autorecovery/bookie",
        "Have the ledgers of stopped bookies copied; with delete_cookie, then delete their cookies",
        {200: str, 404: str},
        method="PUT",
        body=RECOVER,
    ),
    _java(
        "java_list_bookies",
        "bookie/list_bookies",
        "Registered bookies: writable ones, or with type=ro read-only ones",
        {200: HOST_NAMES},
        parameters=(
            _option("type", "ro: the read-only bookies"),
            _option("print_hostnames", "true: with their host names"),
        ),
    ),
)
