"""Cases of other servers' tests as data, sent to foresay's server."""
