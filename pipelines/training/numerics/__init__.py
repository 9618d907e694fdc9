"""The arithmetic of an update: objective and its weights, masters and their rounding, optimizer, adapters, and
parameters split over workers."""
