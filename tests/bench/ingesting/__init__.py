"""The parts of `make bench-ingest`."""
