"""A conversation: the messages go through the model's own chat template."""

from __future__ import annotations

from sameseed import LLM, SamplingParams

llm = LLM("embedded", draft="embedded-draft")
messages = [{"role": "user", "content": "A pen costs 2 dollars. How much do 6 pens cost?"}]
for question in ("And 10 pens?", None):
    answer = llm.chat(messages, SamplingParams(max_tokens=64))
    print(f"user: {messages[-1]['content']}\nassistant: {answer.text}\n")
    if question is not None:
        messages += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": question}]
