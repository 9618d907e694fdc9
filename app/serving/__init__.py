"""Engines: the embedded torch engine behind HTTP, the client the gateway uses, servers of other make and what keeps versions on them
(`servers`); hot swap by digest.

Fed by the deployment pointer and releases / feeds the gateway with tokens and log-probabilities.
"""
