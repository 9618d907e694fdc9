"""The operators' pages: templates and static files, no JavaScript build.

Fed by `app.domain.views` and the release desk / feeds people, who look and decide.
"""

from app.console.deeds import Hands
from app.console.live import Live
from app.console.pages import Pages, static

__all__ = ["Hands", "Live", "Pages", "static"]
