"""The live gate: what is decided from the evidence of a canary or of the champion in office, and why."""
