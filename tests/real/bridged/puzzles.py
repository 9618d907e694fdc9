"""A taskset that is written for verifiers 0.4: puzzles that reasoning-gym generates, and its own scores of an answer."""

from collections.abc import Iterator

import reasoning_gym
import verifiers.v1 as vf


class PuzzleData(vf.TaskData):
    """One puzzle."""

    source: str
    entry: dict


class PuzzleTask(vf.Task[PuzzleData]):
    """Lays the puzzle into a file too, and scores what was answered, or written into answer.txt."""

    async def setup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        """For whoever works with files."""
        await runtime.write("puzzle.txt", self.data.entry["question"].encode())

    async def validate(self, runtime: vf.Runtime) -> bool | None:
        """Its own answer is right."""
        return self.worth(self.data.entry["answer"]) == 1.0

    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace, runtime: vf.Runtime) -> float:
        """The file where there is one, else the last answer."""
        try:
            written = (await runtime.read("answer.txt", max_bytes=1000)).decode().strip()
        except vf.SandboxError:
            written = trace.last_reply
        return self.worth(written)

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        """As verifiers counts them."""
        return float(trace.num_turns)

    def worth(self, answer: str) -> float:
        """As reasoning-gym says, which pays a little for anything: nothing here."""
        score = reasoning_gym.get_score_answer_fn(self.data.source)(answer, self.data.entry)
        return 1.0 if score >= 1.0 else 0.0


class PuzzleConfig(vf.TasksetConfig):
    """Which puzzles."""

    source: str = "leg_counting"
    num_tasks: int = 3
    with_user: bool = False


class PuzzleTaskset(vf.Taskset[PuzzleTask, PuzzleConfig]):
    """The taskset."""

    def load(self) -> Iterator[PuzzleTask]:
        """The first ones, always the same."""
        for number, entry in enumerate(reasoning_gym.create_dataset(self.config.source, size=self.config.num_tasks, seed=1)):
            prompt = None if self.config.with_user and number == 0 else f"{entry['question']} Answer with the number alone."
            kept = {name: entry[name] for name in ("question", "answer", "metadata")}
            yield PuzzleTask(PuzzleData(name=f"puzzle-{number}", prompt=prompt, source=self.config.source, entry=kept), self.config.task)


__all__ = ["PuzzleTaskset"]
