"""Writes and reads the results of a run, as plain rows, without Spark.

``summary`` holds the counts and the exit code; ``rows`` the schema of verdicts in Parquet. ``plan``
fixes the ledgers of each part. ``run_folder`` manages the files of a run, so that a killed run can
continue. ``checked`` stores when each ledger was last checked. ``replacing`` replaces a file
atomically, and ``files`` a table. ``cluster`` identifies the cluster of the results. ``reading``
opens the results of a finished run. ``figures`` counts what the page of ``report`` shows; ``style``
is its CSS, and ``advice`` the next steps. ``changes`` compares two runs. ``past`` finds earlier
verdicts on one ledger; ``last`` stores the last run's summary in ZooKeeper, for status and metrics.
"""
