"""The official client against a server: python with_openai.py URL; prints what it got as JSON."""

import json
import sys

import openai

client = openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0)
messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "Tell a story"}]
chat = {"model": "embedded", "messages": messages, "temperature": 0, "max_tokens": 24}
plain = {"model": "embedded", "prompt": "def add(a, b):", "temperature": 0, "max_tokens": 24}
whole = client.chat.completions.create(**chat)
pieces = client.chat.completions.create(stream=True, **chat)
answer = client.responses.create(model="embedded", input=messages, temperature=0, max_output_tokens=24)
texts = {
    "chat": whole.choices[0].message.content,
    "chat, streamed": "".join(c.choices[0].delta.content or "" for c in pieces),
    "responses": answer.output_text,
    "completion": client.completions.create(**plain).choices[0].text,
    "completion, streamed": "".join(c.choices[0].text for c in client.completions.create(stream=True, **plain)),
}
print(
    json.dumps(
        {"texts": texts, "tokens": whole.usage.completion_tokens, "models": [m.id for m in client.models.list()]}
    )
)
