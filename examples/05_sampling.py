"""Sampling: seeds reproduce, n asks for several texts, stop strings end them, logprobs explain them."""

from __future__ import annotations

from sameseed import LLM, SamplingParams

llm = LLM("embedded", draft="embedded-draft")
params = SamplingParams(max_tokens=40, temperature=0.9, top_p=0.95, seed=11, n=2, stop=("\n\n",), logprobs=2)
completions = llm.generate("Once upon a time", params)
for completion in completions:
    print(f"seed {completion.seed}, {completion.finish_reason.value}: {completion.text!r}")

again = llm.generate(
    "Once upon a time", SamplingParams(max_tokens=40, temperature=0.9, top_p=0.95, seed=11, stop="\n\n")
)
assert again[0].text == completions[0].text, "the same seed writes the same text"

first = completions[0].logprobs
assert first is not None
for entry in first[:5]:
    others = ", ".join(f"{llm.tokenizer.decode([token])!r} {logprob:.2f}" for token, logprob in entry.top)
    print(f"{llm.tokenizer.decode([entry.token_id])!r:12} {entry.logprob:6.2f}   likeliest: {others}")
