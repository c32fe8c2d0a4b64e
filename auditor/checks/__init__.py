"""The periodic checks of the leader.

``records`` is what a check is, what all share, and how far each is; ``runner`` runs those that are
due. The checks: ``copies`` reads and counts copies, ``placement`` compares them with the placement
policy, and ``idle`` finds open ledgers without a writer.
"""
