"""Releases: the desk, the pointer, the watch, and what acts on them."""
