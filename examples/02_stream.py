"""Print a text as it grows: each delta is what one pass of the target decided, often several tokens."""

from __future__ import annotations

from sameseed import LLM, SamplingParams

llm = LLM("embedded", draft="embedded-draft")
for delta in llm.stream("The water cycle begins when", SamplingParams(max_tokens=48)):
    print(delta.text, end="", flush=True)
    if delta.completion is not None:
        metrics = delta.completion.metrics
        print(f"\n[{metrics.num_output_tokens} tokens in {metrics.spec.num_rounds} passes of the target]")
