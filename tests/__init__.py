"""Tests: unit mirrors the source, ports runs one suite over fake and real adapters, the rest by what they start."""
