"""Filters: which changes a client wants to see. It acknowledges all others implicitly.

A filter is a function of a ``Span``. The span names object and versions only. A filter by bookies
or custom metadata looks up the metadata, which its caller must have at hand, for example in the
catalogue that it keeps. A change that leaves the view, such as a ledger that moves off a bookie,
is seen only if the filter still says True for it.
"""

from __future__ import annotations

from collections.abc import Container

from checkpoints.model import Span, ledger_id_of
from checkpoints.receipt_book import SpanFilter


def only_ledgers(ledger_ids: Container[int]) -> SpanFilter:
    """Return a filter for these ledgers: a set of ids, or a ``range`` of them."""

    def is_wanted(span: Span) -> bool:
        return ledger_id_of(span.key) in ledger_ids

    return is_wanted
