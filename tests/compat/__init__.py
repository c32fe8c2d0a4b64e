"""Lists what Java's AutoRecovery does, rightly or wrongly, and the tests that show what bookmender
does.

``make compat`` generates ``docs/compatibility.md`` and a longer report from it. The rows are in the
TOML files here, one for each part of the project (``catalogue``). The marker ``compat`` of a test
names the rows that the test shows. ``plugin`` records the markers within a pytest (``evidence``),
which ``gathering`` runs. ``document`` finds faults and writes the pages.
"""
