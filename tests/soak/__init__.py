"""Long runs with faults: ``python -m tests.soak.audit``, for the auditor.

``chaos``: bookies and ledgers that appear, change and disappear. ``worker``: completes marks, as
far as znodes are concerned. ``leaders``: our nodes, killed and restarted, and their memory.
``verdict``: whether the marks are right in the end.
"""
