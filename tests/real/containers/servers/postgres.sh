#!/bin/bash
# What the official image of PostgreSQL promises and infra/ uses: the user and database of POSTGRES_…, the scripts of
# /docker-entrypoint-initdb.d on a server that nobody reaches, then the server, reached from everywhere by password.
set -euo pipefail

if [ "$(id -u)" = 0 ]; then
  mkdir -p "$PGDATA"
  chown -R postgres:postgres /var/lib/postgresql
  exec gosu postgres "$0" "$@"
fi
if [ ! -s "$PGDATA/PG_VERSION" ]; then
  chmod 700 "$PGDATA"
  initdb -D "$PGDATA" -U "$POSTGRES_USER" --pwfile=<(printf '%s' "$POSTGRES_PASSWORD") --auth-local=trust --auth-host=scram-sha-256 \
    --encoding=UTF8 --locale=C
  echo "host all all all scram-sha-256" >> "$PGDATA/pg_hba.conf"
  echo "listen_addresses = '*'" >> "$PGDATA/postgresql.conf"
  pg_ctl -D "$PGDATA" -o "-c listen_addresses='' -k /tmp" -w start
  export PGHOST=/tmp
  psql -v ON_ERROR_STOP=1 -U "$POSTGRES_USER" -d postgres -c "CREATE DATABASE \"$POSTGRES_DB\""
  for file in /docker-entrypoint-initdb.d/*; do
    case "$file" in
      *.sh) . "$file" ;;
      *.sql) psql -v ON_ERROR_STOP=1 -U "$POSTGRES_USER" -d "$POSTGRES_DB" -f "$file" ;;
    esac
  done
  pg_ctl -D "$PGDATA" -m fast -w stop
fi
exec postgres -D "$PGDATA" -k /tmp
