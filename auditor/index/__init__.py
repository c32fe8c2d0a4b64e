"""What the leader knows of every ledger: which bookies it names, and what is needed to decide.

``keeper`` builds it and keeps it true: ``tree_scan`` walks over all metadata, ``reader`` reads a part of it
into the index, ``progress`` how far that is, ``note`` says so to everybody. ``ledger_index`` holds
it, in ``ledger_block``, ``sorted_ids``, ``numbering`` and ``write_sets``.
"""
