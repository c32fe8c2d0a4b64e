"""The leader: it notices lost bookies and publishes the ledgers that miss them."""
