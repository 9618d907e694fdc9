"""HTTP: gateway, feedback and its dialects, events, releases, runs, health, metrics.

Fed by products and operators / feeds the inbox and the release room.
"""
