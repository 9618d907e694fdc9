"""What people do from pages to keys, people and stored data: asked with its effect spelled out, done once, told afterwards.

Fed by the same books and rooms as the endpoints for it (`app.api.people`, `app.api.keys`, `app.api.data`) / feeds people, who decide.
"""

from app.console.deeds.asking import Hands
from app.console.deeds.pages import DeedPages

__all__ = ["DeedPages", "Hands"]
