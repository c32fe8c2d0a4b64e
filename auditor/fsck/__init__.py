"""fsck: checks every ledger, copy by copy, and proves that the data is there. Runs on Spark.

``levels`` are the options of a run, ``ledger_ids`` its ledgers. An ``executor`` runs ``inspecting``:
for each ledger ``copies`` finds the end, ``look`` asks its bookies, ``judging`` judges the answers,
and ``verdicts`` are the result. ``budget`` shares what a run may cost, ``publishing`` marks damaged
ledgers for repair. ``results`` writes and reads results; ``spark`` alone needs PySpark.
"""
