"""The bulk data path: entries read, verified and copied without a task, future or object for each.

In reading order: ``transfers``, the way in; ``job``, what becomes of one transfer's entries;
``readings``, its entries at one source; ``gates``, what they need before they are asked for, and
``flow``, how much of it there is; ``source``, the connections read from, of which ``singles`` and
``batches`` are the two kinds, each with its hot loop; ``target``, those written to; ``lane`` and
``inbox``, what all kinds of connection share; ``frames``, the bytes.
"""
