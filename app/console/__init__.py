"""The operators' pages: templates and static files, no JavaScript build.

Fed by the same queries as the API / feeds people.
"""

from app.console.pages import console

__all__ = ["console"]
