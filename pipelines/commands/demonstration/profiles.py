"""The demo's two models, and how time is compressed for each; `planning` fits the sizes to the machine."""

import string
from dataclasses import asdict, dataclass
from pathlib import Path

from app.domain.errors import BadConfig
from app.machine import free_memory_bytes

TEMPLATE = Path(__file__).parent / "demo.toml"
GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Everything that differs between the models, and between machines."""

    model: str
    """The snapshot: one that `ratchet model` brings (`ratchet:tiny`), or a folder."""
    base_name: str
    base_model: str
    memory_bytes: int
    """What all processes of the demo take together while an update runs."""
    usual_answers_per_s: float
    """Of a machine that needs no patience."""
    concurrency: int = 32
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
    margin: float
    reward_margin: float
    off_policy_s: float
    """The off-policy gate may take so long in each cycle."""
    default_slot_s: int
    adapters: str = ""
    """The table `[training.lora]`; empty where all parameters are trained."""
    turn_share: float = 0.4
    """An update's seconds per turn as a share of a lone turn's with all parameters: turns share their prompts and are computed together,
    adapters need no gradient of the weights, and Adam comes on top."""
    training_threads: int = 0
    """Threads of the update; 0 for all cores."""
    patience: float = 1.0
    """How many times longer than on a fast machine everything that waits for the machine may take: leases, engines, answers, canaries."""


ADAPTERS = """\
[training.lora] # an update of all parameters takes 1.6 times as long for nearly the same gain (make bench-lesson)
rank = 16
alpha = 32
learning_rate = 2e-3"""
PROFILES = {
    "smollm2": Profile(
        model="ratchet:smollm2-135m-instruct", base_name="smollm2-135m", base_model="HuggingFaceTB/SmolLM2-135M-Instruct",
        memory_bytes=6 * GIB, usual_answers_per_s=5.0, concurrency=24,
        panel_turns=96, label_wait_s=4.0, max_tokens=48, min_turns=48, max_turns=50, horizons="0,2",
        learning_rate=1.2e-4, turns_per_step=50, max_kl_champion=1.0, max_kl_anchor=3.0, suite_margin=0.3, suite_samples=2, suite_tasks=24,
        window_s=1.0, margin=0.20, reward_margin=0.10, off_policy_s=3.0, default_slot_s=60, adapters=ADAPTERS, turn_share=0.25,
    ),
    "tiny": Profile(
        model="ratchet:tiny", base_name="tiny", base_model="ratchet/tiny-random",
        memory_bytes=2 * GIB, usual_answers_per_s=40.0, concurrency=12,
        panel_turns=500, label_wait_s=2.5,
        max_tokens=24, min_turns=128, max_turns=192, horizons="0,0.7", learning_rate=2.5e-3, turns_per_step=32,
        max_kl_champion=2.0, max_kl_anchor=6.0, suite_margin=0.3, suite_samples=2, suite_tasks=32, window_s=1.0,
        margin=0.20, reward_margin=0.10, off_policy_s=1.0, default_slot_s=15,
    ),
}  # fmt: skip


def require_memory(profile: Profile, *, free: int | None = None) -> None:
    """Refuse a machine on which the demo would be killed half-way: `free` bytes, or what the machine and its control groups leave now."""
    left = free_memory_bytes() if free is None else free
    if left < profile.memory_bytes:
        needed, smaller = profile.memory_bytes / GIB, PROFILES["tiny"].memory_bytes
        cure = ' or run the small one, make demo ARGS="--model tiny"' if smaller <= left and smaller < profile.memory_bytes else ""
        raise BadConfig(
            f"the demo with {profile.base_model} needs {needed:.0f} GiB of free memory while it trains and {left / GIB:.1f} are left here: "
            f"end other programs, allow this container more{cure}"
        )


def write_config(profile: Profile, folder: Path, *, slot_s: int) -> Path:
    """Write the demo's configuration into the data folder; returns its path. Raises `BadConfig` where another deployment's data are."""
    if slot_s < 5:
        raise BadConfig(f"--slot is {slot_s} s: give at least 5s, a cycle has to fit into its slot")
    slow = profile.patience
    values = {
        **asdict(profile), "slot_s": slot_s, "patience_s": slot_s - 1.5,
        "lease_s": 20.0 * slow, "heartbeat_s": 5.0, "engine_wait_s": 60.0 * slow, "engine_timeout_s": 300.0 * slow,
        "turn_wait_s": 150.0 * slow, "canary_max_s": 600.0 * slow, "hold_max_s": 120.0 * slow, "no_data_hold_s": 60.0 * slow,
        "holdback_s": 300.0 * slow,
    }  # fmt: skip
    template, path = TEMPLATE.read_text(), folder / "ratchet.toml"
    is_ours = path.read_text().startswith(template.partition("\n")[0]) if path.exists() else not (folder / "ratchet.db").exists()
    if not is_ours:
        raise BadConfig(f"{folder} holds a deployment that is not the demo's: name another folder with --data, or none for a fresh one")
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(string.Template(template).substitute(values))
    return path


def seconds(text: str) -> int:
    """`60`, `60s`, `5m`, `5h` as seconds. Raises `BadConfig`."""
    units = {"s": 1, "m": 60, "h": 3600}
    number, unit = (text[:-1], units[text[-1]]) if text[-1:] in units else (text, 1)
    if not number.isdigit():
        raise BadConfig(f"--slot is {text!r}: give seconds, or a number with s, m or h, such as 60s")
    return int(number) * unit
