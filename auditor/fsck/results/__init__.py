"""What a run leaves behind, read and written as plain rows, without Spark.

``summary`` the counts, and the exit code; ``rows`` verdicts as Parquet; ``plan`` which ledgers a
run looks at, in which parts; ``run_folder`` a run's files, so that a killed one goes on;
``checked`` when each ledger was looked at last; ``replacing`` a file by one that is there whole or
not at all, ``files`` of tables likewise; ``cluster`` whose results these are. ``reading`` the
results of a run that is over; ``figures`` what its report shows, ``report`` that page, ``style``
how it looks, ``advice`` what to do next; ``changes`` two runs compared; ``past`` what was said of
one ledger; ``last`` what the last run of all found, for the daemon's status.
"""
