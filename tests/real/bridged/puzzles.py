"""A taskset that is written for verifiers 0.4: fractions to add up, scored by verifiers' own comparison of mathematical answers."""

from collections.abc import Iterator

import verifiers.v1 as vf


class PuzzleData(vf.TaskData):
    """One sum."""

    question: str
    answer: str


class PuzzleTask(vf.Task[PuzzleData]):
    """Lays the question into a file too, and scores what was answered, or written into answer.txt."""

    async def setup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        """For whoever works with files."""
        await runtime.write("puzzle.txt", self.data.question.encode())

    async def validate(self, runtime: vf.Runtime) -> bool | None:
        """Its own answer is right."""
        return vf.verify_boxed_math_answer(f"\\boxed{{{self.data.answer}}}", self.data.answer) == 1.0

    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace, runtime: vf.Runtime) -> float:
        """The file where there is one, else the last answer."""
        return vf.verify_boxed_math_answer(await vf.read_answer_file_or_last_reply(runtime, "answer.txt", trace), self.data.answer)

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        """As verifiers counts them."""
        return float(trace.num_turns)


class PuzzleConfig(vf.TasksetConfig):
    """How many, and whether the first one's user opens the conversation."""

    num_tasks: int = 3
    with_user: bool = False


class PuzzleTaskset(vf.Taskset[PuzzleTask, PuzzleConfig]):
    """The taskset."""

    def load(self) -> Iterator[PuzzleTask]:
        """1/2 + 1/3, 1/3 + 1/4, …"""
        for n in range(2, self.config.num_tasks + 2):
            question = f"What is 1/{n} + 1/{n + 1}? Answer in \\boxed{{}}."
            prompt = None if self.config.with_user and n == 2 else question
            data = PuzzleData(name=f"puzzle-{n}", prompt=prompt, question=question, answer=f"\\frac{{{2 * n + 1}}}{{{n * (n + 1)}}}")
            yield PuzzleTask(data, self.config.task)


__all__ = ["PuzzleTaskset"]
