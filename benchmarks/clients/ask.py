"""Sends requests with one client to a server and prints the results as JSON: python ask.py CLIENT URL.

Runs in an environment that has the client installed.
"""

import json
import sys
from importlib import import_module
from typing import Any

MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "Tell a story"}]
PROMPT, MODEL = "def add(a, b):", "embedded"
SETTINGS: dict[str, Any] = {"temperature": 0, "max_tokens": 24}


def openai(url: str) -> dict[str, Any]:
    """OpenAI's official client."""
    client = import_module("openai").OpenAI(base_url=url, api_key="none", max_retries=0)
    chat, plain = ({"model": MODEL, **SETTINGS, **asked} for asked in ({"messages": MESSAGES}, {"prompt": PROMPT}))
    whole = client.chat.completions.create(**chat)
    pieces = client.chat.completions.create(stream=True, **chat)
    answer = client.responses.create(model=MODEL, input=MESSAGES, temperature=0, max_output_tokens=24)
    texts = {
        "chat": whole.choices[0].message.content,
        "chat, streamed": "".join(c.choices[0].delta.content or "" for c in pieces),
        "responses": answer.output_text,
        "completion": client.completions.create(**plain).choices[0].text,
        "completion, streamed": "".join(c.choices[0].text for c in client.completions.create(stream=True, **plain)),
    }
    return {"texts": texts, "tokens": whole.usage.completion_tokens, "models": [m.id for m in client.models.list()]}


def langchain_openai(url: str) -> dict[str, Any]:
    """LangChain's OpenAI client: chat, responses, completions, and a batch."""
    package = import_module("langchain_openai")
    settings = {"base_url": url, "api_key": "none", "model": MODEL, **SETTINGS}
    chat, plain = package.ChatOpenAI(**settings), package.OpenAI(**settings)
    responses = package.ChatOpenAI(use_responses_api=True, **settings)
    scored = chat.bind(logprobs=True, top_logprobs=2).invoke(MESSAGES).response_metadata["logprobs"]["content"]
    texts = {
        "chat": chat.invoke(MESSAGES).content,
        "chat, streamed": "".join(c.content for c in chat.stream(MESSAGES)),
        "chat, in a batch": chat.batch([MESSAGES, MESSAGES])[1].content,
        "responses": responses.invoke(MESSAGES).content[0]["text"],
        "completion": plain.invoke(PROMPT),
        "completion, streamed": "".join(plain.stream(PROMPT)),
    }
    tokens = chat.invoke(MESSAGES).usage_metadata["output_tokens"]
    return {"texts": texts, "tokens": tokens, "scored": len(scored)}


def litellm(url: str) -> dict[str, Any]:
    """LiteLLM, with the server addressed as OpenAI's and as vLLM's."""
    litellm = import_module("litellm")
    settings = {"api_base": url, "api_key": "none", **SETTINGS}
    chat = {"model": "openai/embedded", "messages": MESSAGES, **settings}
    plain = {"model": "text-completion-openai/embedded", "prompt": PROMPT, **settings}
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
    return {"texts": texts, "tokens": whole.usage.completion_tokens, "another_model": refused}


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](f"{sys.argv[2]}/v1")))
