"""The hands of the release state machine: start, ramp, approve, promote, abort, roll back, whoever asks.

Fed by gate decisions and operators / feeds the deployment pointer, the audit chain and the outbox.
"""

from app.release.desk import ReleaseDesk

__all__ = ["ReleaseDesk"]
