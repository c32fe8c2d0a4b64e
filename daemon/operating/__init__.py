"""The commands by which operators change a cluster, and what they wait for.

Each has a module, called after it, that parses and prints, and another that does it.
``bookie_command``: what is shown of ``bookies``, with ``bookie_ids`` (which one is meant) and
``unreadable_orders``; ``drain_command`` with ``drains`` and ``away_drains``,
``decommission_command`` with ``decommission`` and ``stuck`` (which ledgers will not move),
``maintenance_command`` with ``last_copies`` (what would be left without any),
``identities_command`` (whose cookies count as old). ``limits_command``; ``hold_command`` with
``hold``; ``check_command`` with ``checks`` and their ``check_rows``; ``repair_command`` with
``repair_by_hand``; ``idle_command`` with ``idle_ledgers`` and ``close_ledger``; ``switch_command``.
``tries``: what is to be tried at once; ``writing_visit``: for who writes metadata by hand;
``marks``: both queues'; ``java_leader``: who keeps to no order of ours; ``progress``: how far a
long one is.
"""
