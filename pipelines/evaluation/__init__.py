"""The gates: one question each, three answers, replayable from the record.

Fed by candidates, suites and live exposures with outcomes / feeds the release room with verdicts.
"""
