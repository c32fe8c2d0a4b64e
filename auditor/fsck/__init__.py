"""fsck: checks every copy of every ledger, and proves that the data is there. Runs on Spark.

Core: ``options`` of a run; ``ledger_list``, its ledgers and the work for each; ``executor``
inspects many ledgers. For each, ``ledger_inspector`` asks the bookies, ``judge`` judges the
answers, and ``verdicts`` are the result.
``budget`` shares the read limits among executors, and ``damage_marker`` marks damaged ledgers for
repair.

``results`` writes and reads results. ``tasks`` check some ledgers each, and ``run`` is a run.
These three need pyarrow. ``spark`` alone needs PySpark. Imports point one way: ``spark``, ``run``,
``tasks``, ``results``, core.
"""
