"""Single-line mutations of the product's code, the tests that could notice them, and a copy of the tree to try them in.

Fed by `tests.bench.mutants` (`make bench-mutants`).
"""
