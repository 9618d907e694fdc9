"""Sampling token by token: the forward pass with its cache, what shapes an answer, and drafts that are verified."""
