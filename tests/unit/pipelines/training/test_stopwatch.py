"""What a run computed, in seconds: blocks add up, also those that raise."""

import time

import pytest

from pipelines.training.stopwatch import Stopwatch


def test_blocks_add_up_from_nothing() -> None:
    watch = Stopwatch()
    assert watch.seconds == 0.0
    with watch.running():
        time.sleep(0.02)
    first = watch.seconds
    assert 0.02 <= first < 0.9
    time.sleep(0.05)
    with pytest.raises(ValueError, match="broke"), watch.running():
        time.sleep(0.02)
        raise ValueError("broke")
    assert watch.seconds - first >= 0.02
