"""What the leader knows of every ledger: which bookies it names, and what is needed to decide.

``keeper`` builds it and keeps it true: ``tree_scan`` walks over all metadata, ``reader`` reads a
part of it into the index, ``own_writes`` spares it what this node wrote, ``progress`` says how far
that is, ``note`` tells everybody. ``ledger_index`` holds it, in ``ledger_block``, ``sorted_ids``,
``numbering`` and ``write_sets``.
"""
