import os
from typing import Literal

from agents import Agent, ModelSettings, RunConfig, Runner, function_tool, set_default_openai_client, set_tracing_disabled
from openai import AsyncOpenAI
from pydantic import BaseModel
from said import say

set_default_openai_client(AsyncOpenAI(base_url=os.environ["BASE_URL"] + "/v1", api_key="unused", max_retries=0))
set_tracing_disabled(disabled=True)
asked: list[str] = []


@function_tool
def weather(city: Literal["Bern"]) -> str:
    """What the weather is like."""
    asked.append(city)
    return "sunny"


class Answer(BaseModel):
    sunny: bool


settings = ModelSettings(max_tokens=200)
plain = Runner.run_sync(Agent(name="plain", model="composer", model_settings=settings), "def f(x):")
say("run", id=plain.raw_responses[0].response_id, text=plain.final_output)
typed = Runner.run_sync(Agent(name="typed", model="composer", output_type=Answer, model_settings=settings), "Is it sunny?")
say("typed", id=typed.raw_responses[0].response_id, sunny=typed.final_output.sunny)
forced = ModelSettings(max_tokens=200, tool_choice="required", parallel_tool_calls=False)
used = Runner.run_sync(
    Agent(name="tools", model="composer", tools=[weather], model_settings=forced), "How is it in Bern?", run_config=RunConfig()
)
say("tool", called=len(asked), answers=len(used.raw_responses))
