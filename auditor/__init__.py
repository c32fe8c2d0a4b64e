"""The leader: it notices lost bookies and marks the ledgers that they held.

``election`` chooses the leader, whose loop is ``auditor``. ``absence`` decides when a bookie is lost,
``absence_tracker`` keeps and stores what is known of absent bookies, and ``safety_hold`` pauses all
after a mass failure; ``loss_tracker`` puts them together. ``ledger_map`` knows which ledgers name a bookie; ``ledger_map_updater`` keeps it
true. ``underreplication`` decides which ledgers to mark and in which order, and ``marker`` marks
them; ``findings`` says why. ``draining`` marks the ledgers of draining bookies, ``recheck`` looks
again at copies made lately, ``activity`` measures clients' writes, and ``scan`` reads what a new
leader must know. ``records`` are the leader's znodes. ``observer`` decides the same
without writing. ``checks`` run from time to time; ``fsck`` audits every copy on Spark.
``settings`` is what an operator may set.
"""
