"""Speaking to bookies: ``client`` asks them one thing at a time, ``bulk`` moves entries by the thousand.

Below them ``channel`` and ``connection`` carry requests of the ``protocol``; ``budget`` bounds what one
process may ask of one bookie.
"""
