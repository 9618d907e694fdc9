"""Turns of older versions: the corrected update still ends where the on-policy one does, the uncorrected one visibly does not."""

from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import pytest

from pipelines.training.config import CorrectionConfig
from tests.fakes.learning import fake_ports
from tests.learning.policy_iteration import CONFIG, iterate

pytestmark = pytest.mark.learning


def final(folder: Path, *, correction: Any, lag: int) -> float:
    """Mean of the last three readings after 32 cycles."""
    config = msgspec.structs.replace(CONFIG, correction=CorrectionConfig(name=correction))
    return fmean(iterate(fake_ports(folder / f"{correction}-{lag}"), cycles=32, lag=lag, config=config).liked[-3:])


def test_two_versions_of_lag_cost_less_than_two_percent_and_sixteen_without_a_correction_cost_more(tmp_path: Path) -> None:
    on_policy = final(tmp_path, correction="tis", lag=0)
    assert final(tmp_path, correction="tis", lag=2) > 0.98 * on_policy
    assert final(tmp_path, correction="none", lag=16) < 0.98 * on_policy
