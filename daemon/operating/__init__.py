"""The commands by which operators change a cluster, and what they wait for.

``bookie_command`` with ``bookies`` (what is shown of each), ``bookie_ids`` (which one is meant), ``unreadable_orders``, ``drains``
and ``decommission``; ``limits_command``; ``hold_command`` with ``hold``; ``repair_command`` with
``repair_by_hand``; ``idle_command`` with ``idle_ledgers`` and ``close_ledger``; ``switch_command``;
``progress`` how far a long one is.
"""
