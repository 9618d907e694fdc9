"""How people get in: passwords, links that are good once, browser sessions, the tokens of forms.

Fed by the pages and endpoints of signing in / feeds whoever asks who is there. What is stored, `app.db.access.people` stores.
"""

from app.access.forms import FORM_COOKIE, SESSION_COOKIE, FormTokens, local_path
from app.access.passwords import Passwords
from app.access.porch import Porch
from app.access.sign_in import SignIn

__all__ = ["FORM_COOKIE", "SESSION_COOKIE", "FormTokens", "Passwords", "Porch", "SignIn", "local_path"]
