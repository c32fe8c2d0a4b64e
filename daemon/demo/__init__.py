"""The demonstration: kills one of several real bookies and proves that no entry was lost.

``command`` prints what ``scenario`` does: it writes ledgers and starts daemons that repair them.
``proof`` reads every copy.
"""
