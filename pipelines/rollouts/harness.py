"""The harness that comes with us: a small coding agent in one file (`boxed/agent.py`), the same here and in a product.

Its tools' schemas are in that file and nowhere else, so practice cannot differ from production in them.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pipelines.rollouts.tasks import Launch, TaskData

AGENT = Path(__file__).with_name("boxed") / "agent.py"
RUNNER = Path(__file__).with_name("boxed") / "seen_tests.py"
FOLDER = ".harness"


@dataclass(frozen=True)
class CodingAgent:
    """The harness."""

    program: Path = AGENT
    name: str = "coding-agent"
    search_model: str | None = None
    """The policy that finds files and lines for it; None and it has no such step."""

    @property
    def hash(self) -> str:
        """SHA-256 of the program, and of whether it has the step."""
        step = b"" if self.search_model is None else b"search"
        return hashlib.sha256(self.program.read_bytes() + RUNNER.read_bytes() + step).hexdigest()

    def launch(self, endpoint: str, secret: str, data: TaskData, *, model: str, python: str) -> Launch:
        """The agent beside its task; endpoint and key come as any OpenAI client reads them."""
        task = {
            "instruction": data.instruction, "answer_file": data.answer_file, "most_turns": data.most_turns,
            "max_tokens": min(1024, data.most_tokens), "test_command": [python, "-I", "-S", "-B", f"{FOLDER}/seen_tests.py"],
        }  # fmt: skip
        words = [f"OPENAI_BASE_URL={endpoint}/v1", f"OPENAI_API_KEY={secret}", f"OPENAI_MODEL={model}"]
        words += [f"OPENAI_SEARCH_MODEL={self.search_model}"] if self.search_model is not None else []
        return Launch(
            argv=("/usr/bin/env", *words, python, "-I", "-S", "-B", f"{FOLDER}/agent.py", f"{FOLDER}/task.json"),
            files={
                f"{FOLDER}/agent.py": self.program.read_bytes(), f"{FOLDER}/task.json": msgspec.json.encode(task),
                f"{FOLDER}/seen_tests.py": RUNNER.read_bytes(),
            },
        )  # fmt: skip
