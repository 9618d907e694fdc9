"""A judge model behind any OpenAI-compatible endpoint."""

import os

from openai import OpenAI, OpenAIError

from app.domain.errors import Unavailable
from pipelines.evaluation.suites.graders import JudgeModel
from pipelines.evaluation.suites.offline_config import OfflineConfig


def open_judge(config: OfflineConfig) -> JudgeModel | None:
    """The configured judge, or None where no endpoint is configured. Asking it raises `Unavailable`, which leaves the suite undecided."""
    if config.judge_url is None:
        return None
    client = OpenAI(base_url=config.judge_url, api_key=os.environ.get("RATCHET_JUDGE_KEY", "none"), timeout=60, max_retries=2)

    def ask(question: str) -> str:
        try:
            answer = client.chat.completions.create(
                model=config.judge_model, messages=[{"role": "user", "content": question}], temperature=0, max_tokens=8
            )
            return answer.choices[0].message.content or ""
        except (OpenAIError, IndexError) as error:
            raise Unavailable(f"the judge at {config.judge_url} gave no answer: {error}") from error

    return ask
