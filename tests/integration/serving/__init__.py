"""Engines over real sockets."""
