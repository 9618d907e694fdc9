"""Ray takes its manners from the environment when it is first imported, once for a process of tests: imported before Ray is."""

import os
import tempfile
from pathlib import Path

from app.secret_files import secret_file

TOKEN = secret_file(Path(tempfile.mkdtemp(prefix="ratchet-tests-")), "ray_token")
"""Of every cluster that this process starts."""

os.environ.pop("RAY_AUTH_TOKEN", None)
os.environ.pop("RAY_ADDRESS", None)
os.environ |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(TOKEN)}
