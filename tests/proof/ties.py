"""L3e: of tokens with equal logits the first is chosen, in any pass and row."""

import random
from dataclasses import replace

from proof.toy import needs_head, toy_loaded
from sameseed.laws.check import Found, check
from sameseed.laws.subject import Subject
from sameseed.laws.texts import GREEDY, SAME_TEXTS, compare

VOCAB, LENGTH, JOBS = 64, 16, 8
WAYS = {"raw": {}, "biased": {1: -9.0}}  # the second goes through the code for adjusted logits


@check(
    "L3e",
    "equal logits",
    SAME_TEXTS + "; 0 tokens that are not the first of equals",
    least={"ties": 400, "rows_with_ties": 200, "all_rejections": 20},
    tokens=100_000,
)
def equal_logits(subject, effort):
    """In a toy model whose tokens have equal logits in pairs, greedy texts with drafts and trees equal those without.

    The first token of a pair is chosen in passes of many rows as in passes of one row.
    """
    spec = subject.config.spec
    config = replace(subject.config, spec=type(spec)() if needs_head(spec) else spec)
    loaded = toy_loaded(subject.loaded.tokenizer, VOCAB, config, subject.target.ops, twins=True)
    rng = random.Random(subject.seed)
    prompts = [tuple(rng.randrange(3, VOCAB) for _ in range(n)) for n in (3, 5, 8, 6)]
    params = replace(GREEDY, max_tokens=LENGTH, ignore_eos=True, logprobs=2)
    toy = Subject(loaded, prompts, params, max_tokens=LENGTH, batch=JOBS, seed=subject.seed)
    found = Found({"tokens": 0, "ties": 0, "rows_with_ties": 0}, {"differing_texts": 0, "not_the_first": 0})
    wanted, start = effort.of(100_000, 400), 0
    while found.sizes["tokens"] < wanted:
        for name, bias in WAYS.items():
            jobs = toy.jobs(JOBS, replace(params, logit_bias=bias), start)
            plain = toy.run(toy.plain(seqs=1), jobs, alone=True)
            for way, engine in (("plain", None), *toy.drafting(jobs, plain, start, nodes=64)):
                got = plain if engine is None else toy.run(engine, jobs)
                compare(toy, found, f"{name}, {way}", jobs, plain, got)
                for i, c in enumerate(got):
                    found.sizes["tokens"] += len(c.token_ids)
                    found.sizes["rows_with_ties"] += sum(c.accepted)
                    for at, scored in enumerate(c.logprobs or ()):
                        (one, p), (other, q) = scored.top[:2]
                        found.sizes["ties"] += p == q
                        if p == q and scored.token_id != min(one, other):
                            found.statistic["not_the_first"] += 1
                            found.add(f"{name}, {way}, prompt {i}: token {at}", min(one, other), scored.token_id)
        start += JOBS
    found.sizes["all_rejections"] = toy.metrics.num_rollbacks + toy.scripted.num_rollbacks
    subject.leaks += toy.leaks
    subject.num_emptied += toy.num_emptied
    return found
