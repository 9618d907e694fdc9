"""Who gets in, and who is forgotten, in SQL: keys, people, erasures and the proof of an erasure."""
