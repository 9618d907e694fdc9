"""Engines: the embedded torch engine behind HTTP, the client the gateway uses, the vLLM adapter; hot swap by digest.

Fed by the deployment pointer and releases / feeds the gateway with tokens and log-probabilities.
"""
