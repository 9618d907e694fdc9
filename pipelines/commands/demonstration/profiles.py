"""The demo's two sizes: the real model, and a tiny one for tests; how each is compressed."""

import string
from dataclasses import asdict, dataclass
from pathlib import Path

from app.domain.errors import BadConfig

TEMPLATE = Path(__file__).parent / "demo.toml"
ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Everything that differs between the sizes."""

    model: str
    """Folder of the snapshot, relative to the repository."""
    base_name: str
    base_model: str
    budget_s: float
    """The demo ends, with whatever happened, after this."""
    concurrency: int
    """People at work at the same time."""
    panel_turns: int
    """Answers to held-out people before, and after."""
    label_wait_s: float
    max_tokens: int
    min_turns: int
    """Labels below which a slot has nothing to learn from."""
    max_turns: int
    """Turns in a batch at most."""
    horizons: str
    """When edits are looked at, seconds after the answer; the last one before the label is due."""
    learning_rate: float
    turns_per_step: int
    max_kl_champion: float
    max_kl_anchor: float
    suite_margin: float
    suite_samples: int
    suite_tasks: int
    window_s: float
    canary_max_s: float
    margin: float
    reward_margin: float
    off_policy_s: float
    """The off-policy gate may take so long in each cycle."""
    default_slot_s: int


PROFILES = {
    "smollm2": Profile(
        model=".cache/models/smollm2-135m-instruct", base_name="smollm2-135m", base_model="HuggingFaceTB/SmolLM2-135M-Instruct",
        budget_s=720, concurrency=16, panel_turns=130, label_wait_s=5.0, max_tokens=48,
        min_turns=64, max_turns=80, horizons="0,2", learning_rate=4e-5, turns_per_step=16, max_kl_champion=1.0, max_kl_anchor=3.0,
        suite_margin=0.3, suite_samples=2, suite_tasks=48, window_s=1.0, canary_max_s=180.0, margin=0.20, reward_margin=0.10,
        off_policy_s=3.0, default_slot_s=60,
    ),
    "tiny": Profile(
        model=".cache/models/tiny", base_name="tiny", base_model="ratchet/tiny-random", budget_s=178, concurrency=12, panel_turns=300,
        label_wait_s=2.5, max_tokens=24, min_turns=64, max_turns=128, horizons="0,0.7", learning_rate=2.5e-3, turns_per_step=32,
        max_kl_champion=2.0, max_kl_anchor=6.0, suite_margin=0.3, suite_samples=2, suite_tasks=32, window_s=1.0, canary_max_s=90.0,
        margin=0.20, reward_margin=0.10, off_policy_s=1.0, default_slot_s=15,
    ),
}  # fmt: skip


def write_config(profile: Profile, folder: Path, *, slot_s: int) -> Path:
    """Write the demo's configuration into the data folder; returns its path."""
    if slot_s < 5:
        raise BadConfig(f"--slot is {slot_s} s: give at least 5s, a cycle has to fit into its slot")
    values = {**asdict(profile), "model": str(ROOT / profile.model), "slot_s": slot_s, "patience_s": slot_s - 1.5}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "ratchet.toml"
    path.write_text(string.Template(TEMPLATE.read_text()).substitute(values))
    return path


def seconds(text: str) -> int:
    """`60`, `60s`, `5m`, `5h` as seconds. Raises `BadConfig`."""
    units = {"s": 1, "m": 60, "h": 3600}
    number, unit = (text[:-1], units[text[-1]]) if text[-1:] in units else (text, 1)
    if not number.isdigit():
        raise BadConfig(f"--slot is {text!r}: give seconds, or a number with s, m or h, such as 60s")
    return int(number) * unit
