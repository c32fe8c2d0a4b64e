"""What is missing of a ledger, and what is to be copied where: decisions, and the questions before
them.

``survey`` looks at one ledger, ``check`` at its copies, by ``questions`` to their bookies, and by
``entry_lists`` where these are wanted; ``plan`` says what goes where, to one of the ``targets``,
less its ``refusals``; ``rewrite`` what becomes of the metadata. ``open_ledger``: what to do about
an open end; ``open_fragment``: what of it is missing. ``preview``: a plan for people;
``copy_doubts``: in words, what metadata names without the copies. ``entry_runs``: entry ids that
weigh little.
"""
