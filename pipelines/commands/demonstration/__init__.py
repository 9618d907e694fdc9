"""The demo: a deployment with simulated people in front of it, watched live, with a harmful candidate planted at the end.

Fed by the read-only views and the public API / feeds a terminal, a summary and an exit code.
"""
