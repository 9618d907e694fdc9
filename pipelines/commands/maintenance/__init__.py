"""What whoever keeps a deployment alive does: schema, backups, retention, dead letters, erasures, examination and recovery."""
