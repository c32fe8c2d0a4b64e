"""What the leader knows of every ledger: which bookies it names, and what is needed to decide.

``ledger_index`` holds it; ``keeper`` builds it by one walk over all metadata and keeps it true.
"""
