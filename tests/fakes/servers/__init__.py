"""Servers of other make, as their protocols are known: what an adapter meets in the suite."""
