"""TRL's half of `make bench-train`; runs in TRL's own environment and imports nothing of ours."""

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import numpy
import torch
from datasets import Dataset  # type: ignore[import-not-found]
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found]

MODEL = Path(__file__).resolve().parents[2] / ".cache" / "models" / "smollm2-135m-instruct"


class Stopwatch(TrainerCallback):
    """Seconds per optimizer step; keeps the first gradient."""

    def __init__(self, gradients: Path) -> None:
        self.gradients = gradients
        self.seconds: list[float] = []
        self.started = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.started = time.perf_counter()

    def on_pre_optimizer_step(self, *_: Any, **given: Any) -> None:
        if not self.seconds:
            paused = time.perf_counter()
            self.gradients.mkdir()
            for name, parameter in given["model"].named_parameters():
                if parameter.grad is not None:
                    numpy.save(self.gradients / f"{name}.npy", parameter.grad.numpy())
            self.started += time.perf_counter() - paused

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(time.perf_counter() - self.started)


def main() -> None:
    """Run GRPOTrainer over the logged completions."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--dtype")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--keep-activations", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows: list[dict[str, Any]] = json.loads(arguments.data.read_text())
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    names = [str(place) for place in range(len(rows) // 2)]

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        """The logged turns of the prompts, which are numbers of pairs, each asked for twice."""
        seen: dict[str, int] = {}
        chosen: list[dict[str, Any]] = []
        for prompt in prompts:
            chosen.append(rows[2 * int(prompt) + seen.get(prompt, 0) % 2])
            seen[prompt] = seen.get(prompt, 0) + 1
        return {
            "prompt_ids": [row["prompt"] for row in chosen], "completion_ids": [row["completion"] for row in chosen],
            "logprobs": [[-1.0] * len(row["completion"]) for row in chosen], "logged_reward": [row["reward"] for row in chosen],
        }  # fmt: skip

    def reward(completions: list[str], logged_reward: list[float], **_: Any) -> list[float]:
        return logged_reward

    per_pass = min(len(rows), 8)  # TRL's default
    config = GRPOConfig(
        output_dir=str(arguments.out.parent / "outputs"), per_device_train_batch_size=per_pass, num_generations=2,
        gradient_accumulation_steps=len(rows) // per_pass, max_steps=arguments.steps,
        gradient_checkpointing=not arguments.keep_activations,
        learning_rate=1e-6, beta=0.0, loss_type="dr_grpo", scale_rewards="none", bf16=arguments.dtype == "bfloat16", report_to=[],
        logging_steps=1000, save_strategy="no", max_completion_length=max(len(row["completion"]) for row in rows), shuffle_dataset=False,
        use_cpu=True, max_grad_norm=1e9, mask_truncated_completions=False, disable_tqdm=True,
    )  # fmt: skip
    watch = Stopwatch(arguments.out.with_suffix(""))
    trainer = GRPOTrainer(
        model=model, reward_funcs=reward, args=config, train_dataset=Dataset.from_dict({"prompt": names}), processing_class=tokenizer,
        rollout_func=rollout, callbacks=[watch],
    )  # fmt: skip
    trainer.train()
    status = Path("/proc/self/status").read_text()
    peak = int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) / 1024
    tokens = sum(len(row["prompt"]) + len(row["completion"]) for row in rows)
    median = sorted(watch.seconds)[len(watch.seconds) // 2]
    arguments.out.write_text(json.dumps({"tokens_per_s": tokens / median, "peak_rss_mb": peak, "seconds": watch.seconds}))


if __name__ == "__main__":
    main()
