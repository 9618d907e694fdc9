import os
from typing import Literal

from langchain_openai import ChatOpenAI
from pydantic import BaseModel
from said import say


class Greeting(BaseModel):
    """How to greet."""

    word: Literal["hi", "hello"]
    times: Literal[1, 2]


model = ChatOpenAI(model="composer", base_url=os.environ["BASE_URL"] + "/v1", api_key="unused", max_retries=0, max_tokens=200)
answer = model.invoke("def f(x):")
say("invoke", id=answer.response_metadata["id"], text=answer.content)
say("stream", text="".join(str(chunk.content) for chunk in model.stream("def f(x):")))
for method in ("json_schema", "function_calling"):
    found = model.with_structured_output(Greeting, method=method, include_raw=True).invoke("Greet me.")
    say(method, id=found["raw"].response_metadata["id"], parsed=found["parsed"].model_dump())
called = model.bind_tools([Greeting], tool_choice="required", parallel_tool_calls=False).invoke("Greet me.")
say("required", calls=[call["name"] for call in called.tool_calls])
likely = model.bind(logprobs=True, top_logprobs=2).invoke("def f(x):")
say("logprobs", alternatives=[len(item["top_logprobs"]) for item in likely.response_metadata["logprobs"]["content"]])
