"""Names of earlier releases: commands that have other names now, and what is gone."""

RENAMED = {
    "check list": "check",
    "check pause": "check --pause",
    "check resume": "check --resume",
    "check run": "check",
    "demo": "local demo",
    "feed failures": "feed clients",
    "feed forget": "feed clients --forget",
    "health explain": "status --explain",
    "hold begin": "hold --begin",
    "hold end": "hold --end",
    "hold show": "hold",
    "observe": "plan --all",
    "queue list": "queue",
}
"""Old names that work for one release, and today's. All old options stay."""

GONE = {
    "bookie drain --dry-run": "bookmender plan --bookie ID",
    "fsck diff": "bookmender fsck show DIR LEDGER, which shows the verdicts of all runs",
    "fsck report": "DIR/report.html, which each run writes, or bookmender fsck show DIR LEDGER",
    "fsck run --entry-lists": "bookmender fsck run without it: entries are read",
    "fsck run --skip-checked-within": "--for, or --changed, of bookmender fsck run",
    "health": "bookmender status --explain",
    "plan --plan": "bookmender plan --all --limit N",
    "plan --watch": "watch bookmender plan --all, or a node with node.mode = observe, which logs "
    "each change",
    "repair --dry-run": "bookmender plan LEDGER, or bookmender plan --bookie ID",
    "shell forceauditchecks": "bookmender check all-ledgers (or placement, replicas)",
    "shell ledgermetadata": "bookmender ledger show ID",
    "shell listbookies": "bookmender bookie list",
    "shell listledgers": "bookmender plan --bookie ID, or bookkeeper shell listledgers",
    "shell queryautorecoverystatus": "bookmender queue",
}
"""Commands and options that do not exist (any more), and what to use instead."""
