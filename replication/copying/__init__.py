"""Carrying out the copies of a plan: ``copier`` those of a ledger, ``copy_index`` one of them, from the
best of its ``sources``.
"""
