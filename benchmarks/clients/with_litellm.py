"""litellm against a server: python with_litellm.py URL; prints what it got as JSON."""

import json
import sys

import litellm

url = sys.argv[1]
settings = {"api_base": f"{url}/v1", "api_key": "none", "temperature": 0, "max_tokens": 24}
messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "Tell a story"}]
chat = {"model": "openai/embedded", "messages": messages, **settings}
plain = {"model": "text-completion-openai/embedded", "prompt": "def add(a, b):", **settings}
whole = litellm.completion(**chat)
streamed = litellm.completion(stream=True, stream_options={"include_usage": True}, **chat)
texts = {
    "chat": whole.choices[0].message.content,
    "chat, streamed": "".join(c.choices[0].delta.content or "" for c in streamed if c.choices),
    "chat, as a vLLM": litellm.completion(**{**chat, "model": "hosted_vllm/embedded"}).choices[0].message.content,
    "completion": litellm.text_completion(**plain).choices[0].text,
    "completion, streamed": "".join(c.choices[0].text or "" for c in litellm.text_completion(stream=True, **plain)),
}
try:
    litellm.completion(**{**chat, "model": "openai/other"})
    refused = ""
except litellm.NotFoundError as error:
    refused = type(error).__name__
print(json.dumps({"texts": texts, "tokens": whole.usage.completion_tokens, "another_model": refused}))
