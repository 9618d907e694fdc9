"""A judge model behind any OpenAI-compatible endpoint."""

import os

from openai import OpenAI

from pipelines.evaluation.graders import JudgeModel
from pipelines.evaluation.offline_config import OfflineConfig


def open_judge(config: OfflineConfig) -> JudgeModel | None:
    """The configured judge, or None where no endpoint is configured. Errors of the endpoint surface as `openai.OpenAIError`."""
    if config.judge_url is None:
        return None
    client = OpenAI(base_url=config.judge_url, api_key=os.environ.get("RATCHET_JUDGE_KEY", "none"), timeout=60, max_retries=2)

    def ask(question: str) -> str:
        answer = client.chat.completions.create(
            model=config.judge_model, messages=[{"role": "user", "content": question}], temperature=0, max_tokens=8
        )
        return answer.choices[0].message.content or ""

    return ask
