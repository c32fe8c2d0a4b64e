"""The auditor: a node that leads notices lost bookies and marks their ledgers.

In reading order. Each module uses only modules that are listed below it:

- ``election`` chooses the leader, and ``auditor`` is the leader's loop. ``observer`` decides the
  same and writes nothing. ``disable_end`` enables auto-recovery again in time.
- ``checks`` run from time to time. ``draining`` marks the ledgers of draining bookies, ``recheck``
  reads recent copies again, and ``activity`` measures what clients write.
- ``absence`` decides which bookies are lost or reformatted, and ``safety_hold`` pauses marking
  after a mass failure.
- ``records`` are the leader's znodes, and ``history_cleaner`` bounds the history. ``mark_reasons``
  records why ledgers are marked, and marks what checks found. ``marker`` marks under-replicated
  ledgers.
- ``backlog`` measures how much is left to repair, and which ledgers have an entry on no registered
  bookie. ``underreplication`` decides which ledgers lack copies, and ``scan`` reads all metadata
  for commands.
- ``ledger_map_updater`` keeps the ``ledger_map`` current, which knows the ledgers of each bookie.
- ``settings`` are the operator's. ``fsck`` checks every copy, on Spark.
"""
