"""What commands and the HTTP API do in the cluster: one async function a question or an order.

An operation gets an ``AdminSession`` and returns an ``Answer``, which is defined beside it.
``feed`` shows, enables and disables the change feed, and shows its clients.
"""
