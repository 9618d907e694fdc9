"""The model itself: load, tokenise, sample, log-probabilities, weights digest and delta codec.

Fed by snapshots / feeds serving, training and evaluation, which share it so that they cannot disagree.
"""
