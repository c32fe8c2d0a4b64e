"""Observe mode: shows what a node of ours would do, and changes nothing.

``observing`` opens a read-only session and looks repeatedly. ``report`` renders a look as text and
as JSON, for the ``command`` and for a ``node`` in observe mode.
"""
