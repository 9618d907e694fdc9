#!/bin/bash
# With compose.standby.yaml: lets a standby copy this server, and from the first real start on makes commits wait for it. Not on the command line:
# the server that the image runs while it initialises would wait for a standby that cannot be there yet.
if [ -n "${STANDBY_PASSWORD:-}" ]; then
  psql -v ON_ERROR_STOP=1 -v password="$STANDBY_PASSWORD" -U "$POSTGRES_USER" -d postgres <<'SQL'
CREATE ROLE standby REPLICATION LOGIN PASSWORD :'password';
ALTER SYSTEM SET synchronous_standby_names = 'ANY 1 (*)';
SQL
  echo "host replication standby all scram-sha-256" >> "$PGDATA/pg_hba.conf"
fi
