"""What the console's pages read, by key and from rollups.

Fed by the tables / feeds the pages, which never see SQL.
"""

from app.db.sight.book import SqlPages

__all__ = ["SqlPages"]
