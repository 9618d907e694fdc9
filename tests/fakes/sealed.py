"""A seal with a key that everybody knows."""

from app.sealing import Seal

SEAL = Seal(keys=lambda: ("a webhook key",))
