"""Carrying out the copies of a plan: ``copier`` those of a ledger, ``copy_index`` one of them (a
``copy_job``), from the best of its ``sources``, and ``with_lac`` where the LAC is rewritten on the
way; ``results``: what may be written once that is done; ``foresight``: what a plan will come to.
"""
