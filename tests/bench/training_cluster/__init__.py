"""Machines of a Ray cluster, each with a network, temporary files and shared memory of its own, and what trains on them.

Fed by `tests.bench.cluster` and `tests/real/test_ray_cluster.py` / feeds them with what happened, as lines of JSON.
"""
