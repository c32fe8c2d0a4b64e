"""Speaking to bookies: ``client`` asks them one thing at a time, ``bulk`` moves entries by the
thousand; ``names`` looks host names up, ``opening`` makes both for those who need no more than
that.

Below them ``channel`` and ``connection`` carry requests of the ``protocol``; ``budget`` bounds what
one process may ask of one bookie. ``quarantine`` says which bookies are left alone because they did
not answer, ``quarantining`` does so.
"""
