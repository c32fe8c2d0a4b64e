"""The columns of the data sources. They are stable: columns may be added, but a change of meaning
needs a new name.

Times are milliseconds since 1970. Ranges are inclusive at both ends.
"""

LEDGERS = """
    ledger_id BIGINT NOT NULL,
    state STRING COMMENT 'open, in_recovery, closed; null where the metadata cannot be read',
    ensemble_size INT,
    write_quorum INT,
    ack_quorum INT,
    last_entry_id BIGINT COMMENT 'null unless closed; -1: empty',
    length BIGINT COMMENT 'bytes of payload, null unless closed',
    digest_type STRING COMMENT 'null where the metadata holds none',
    ctime_ms BIGINT COMMENT 'when it was created, null where the metadata does not say',
    format_version INT COMMENT 'of the metadata: 1, 2 or 3',
    metadata_version INT COMMENT 'of the znode: how often the metadata was changed',
    mtime_ms BIGINT COMMENT 'when the metadata was changed last',
    custom MAP<STRING, BINARY> COMMENT 'what its application keeps there',
    fragments ARRAY<STRUCT<
        first_entry_id: BIGINT,
        last_entry_id: BIGINT COMMENT 'null: it may still be written',
        ensemble: ARRAY<STRING>>>,
    error STRING COMMENT 'why the metadata cannot be read'
"""
"""One row for each ledger, without its password."""

BOOKIES = """
    bookie STRING NOT NULL,
    state STRING COMMENT 'writable, read_only, missing: it has a cookie, and is not registered',
    host STRING,
    port INT,
    has_cookie BOOLEAN COMMENT 'it was set up, and is not decommissioned',
    cookie_ctime_ms BIGINT COMMENT 'when it was set up, last'
"""
"""One row for each bookie that is registered or has a cookie."""

UNDERREPLICATED = """
    ledger_id BIGINT NOT NULL,
    queue STRING COMMENT 'shared: with the Java workers; own: what Java would find whole, as drains, repairs by hand, misplaced copies, damage it does not look at',
    bookies ARRAY<STRING> COMMENT 'those found missing; none: the placement is to be repaired',
    ctime_ms BIGINT COMMENT 'when it was marked, or the mark was last extended',
    is_readable BOOLEAN
"""
"""One row for each mark."""

ENTRIES = """
    ledger_id BIGINT NOT NULL,
    entry_id BIGINT NOT NULL,
    bookie STRING NOT NULL,
    answer STRING COMMENT 'present: its digest is good; absent, mismatch, unreadable, unknown',
    entry_bytes INT COMMENT 'as stored, headers and digest included',
    payload_bytes INT,
    payload_crc32c BIGINT,
    length BIGINT COMMENT 'of the ledger up to this entry, as its header says',
    lac BIGINT COMMENT 'as its header says; copies may differ'
"""
"""One row for each copy that should exist. A column is null if the bookie did not return it, or the
entry does not match its digest."""
