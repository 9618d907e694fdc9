"""What operators need of the databases: readings for `/metrics`, what a deployment knows of itself, what a check asks.

Fed by the tables of the other rooms / feeds metrics, `ratchet doctor`, `ratchet backup` and the drill.
"""
