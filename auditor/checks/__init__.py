"""The periodic checks: what the leader looks at from time to time, ledger by ledger.

``kinds`` which there are, ``check`` what one is; ``schedule`` when it is due, from the times that
Java's auditor keeps as well; ``records`` how far each is and what it found; ``runner`` runs them,
one at a time, and tells by ``progress`` and ``meters``; ``looks`` goes through a part of the
ledgers, ``each`` looks at several side by side, ``reports`` marks what is wrong.

``copies`` looks at a ledger's copies twice before anything is said of them: for ``all_ledgers``,
which looks for lost entries, and ``replicas``, which counts copies. ``placement`` holds where
copies are against the policy. ``overdue`` looks at marks instead of ledgers. ``idle_open`` looks
for open ledgers whose writers are gone, by what ``idle_sightings`` keeps from run to run.
"""
