"""Complete two prompts with the embedded model, guessed by its draft model and checked by itself."""

from __future__ import annotations

from sameseed import LLM, SamplingParams

llm = LLM("embedded", draft="embedded-draft", num_draft_tokens=4)
prompts = ["def add(a, b):\n", "A triangle has three sides. Its area is"]
for completion in llm.generate(prompts, SamplingParams(max_tokens=48)):
    spec = completion.metrics.spec
    print(completion.prompt, completion.text, sep="")
    print(f"[{spec.num_accepted_tokens} of {len(completion.token_ids)} tokens were guessed by the draft]\n")
