"""The only room that speaks SQL (SQLAlchemy 2, sync): SQLite in WAL mode by default, PostgreSQL in production, same code.

Fed by every process through `app.wiring` / feeds the ports of `app.domain.ports`. One stage run is one transaction.
"""
