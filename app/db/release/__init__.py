"""What serves and why, in SQL: versions, the pointer, releases with their evidence, engines, alarms, the audit chain and who is told."""
