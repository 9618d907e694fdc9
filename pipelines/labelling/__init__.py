"""Rewards: every turn gets a label with its breakdown, or an exclusion with its reason, when its wait is over.

Fed by turns and observations / feeds batching, the gates and the label report.
"""
