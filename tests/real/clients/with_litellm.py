import os

import litellm
from said import say

base = {"model": "openai/composer", "api_base": os.environ["BASE_URL"] + "/v1", "api_key": "unused"}
hello = [{"role": "user", "content": "def f(x):"}]

answer = litellm.completion(**base, messages=hello, n=2, seed=1, max_tokens=8)
say("completion", id=answer.id, choices=len(answer.choices), fingerprint=answer.system_fingerprint)
chunks = list(litellm.completion(**base, messages=hello, stream=True, max_tokens=8))
say("stream", id=chunks[0].id, text="".join(chunk.choices[0].delta.content or "" for chunk in chunks))
schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
kept = litellm.completion(
    **base, messages=hello, response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
)
say("schema", id=kept.id, text=kept.choices[0].message.content)
try:
    litellm.completion(**base, messages=[{"role": "user", "content": "word " * 4000}])
except litellm.ContextWindowExceededError as error:
    say("too long", raised=type(error).__name__)
try:
    litellm.completion(**base | {"model": "openai/nobody"}, messages=hello)
except litellm.NotFoundError as error:
    say("unknown", raised=type(error).__name__)
