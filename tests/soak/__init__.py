"""Long runs with faults: ``python -m tests.soak.audit``, for the auditor.

``chaos``: bookies and ledgers that come, change and go. ``worker``: works marks off, as far as that
is a matter of znodes. ``leaders``: our nodes, killed and started again, and what they weigh.
``verdict``: whether the marks are right in the end.
"""
