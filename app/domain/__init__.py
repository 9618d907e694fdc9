"""The language of the loop: events, turns, rewards, batches, versions, gates, releases, ports and errors, with no I/O.

Fed by nothing / feeds every other room.
"""
