"""What was said, in SQL: the durable door, the relay, exactly-once application, and the turns and observations that come of it."""
