"""From Kafka to rows: turns, observations and exposures applied exactly once in effect; the relay and the reconciler.

Fed by `ratchet.events` / feeds labelling (SQL) and training (segments).
"""
