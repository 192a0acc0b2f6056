"""Same seed, same text: however its tokens are guessed, greedy and sampled."""

from __future__ import annotations

from sameseed import LLM, SamplingParams

PROMPT = "def mean(values):\n"
SETTINGS = {"greedy": SamplingParams(max_tokens=48), "sampled": SamplingParams(max_tokens=48, temperature=0.8, seed=7)}

ways = {
    "plain": LLM("embedded"),
    "n-gram, k=3": LLM("embedded", draft="ngram", num_draft_tokens=3),
    "draft model, k=5": LLM("embedded", draft="embedded-draft", num_draft_tokens=5),
    "draft model, until unsure": LLM("embedded", draft="embedded-draft", num_draft_tokens=8, confidence=0.5),
}
for how, params in SETTINGS.items():
    texts = set()
    for name, llm in ways.items():
        completion = llm.generate(PROMPT, params)[0]
        texts.add(completion.text)
        rate = completion.metrics.spec.acceptance_rate
        print(f"{how:8} {name:26} {completion.metrics.spec.num_rounds:3} passes, accepted: {rate}")
    assert len(texts) == 1, "the text must not depend on the guessing"
