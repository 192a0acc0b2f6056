"""Rollouts written together equal those written alone, and acceptance counts equal those of real rounds."""

from __future__ import annotations

import random

import pytest
import torch
from tokenizers import Tokenizer

from sameseed_train.data import Document
from sameseed_train.measure import acceptance
from sameseed_train.model import LlamaForTraining, ModelShape
from sameseed_train.rollout import Rollout, prompt_of, write_batch
from sameseed_train.tokenizer import ASSISTANT, BEGIN

END = 2


def random_model(hidden: int, seed: int) -> LlamaForTraining:
    model = LlamaForTraining(ModelShape(24, hidden, 2, 4, 2, 8, 48), seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 2:
                p.copy_(torch.randn(p.shape, generator=generator) / p.shape[1] ** 0.5)
    return model.eval()


def greedy_alone(model: LlamaForTraining, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    with torch.no_grad():
        while len(ids) < len(prompt) + count:
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
            if ids[-1] == END:
                break
    return ids[len(prompt) :]


def test_greedy_rollouts_equal_those_written_alone() -> None:
    model = random_model(32, seed=5)
    rng = random.Random(0)
    prompts = [[1, *(rng.randrange(3, 24) for _ in range(n))] for n in (3, 9, 5, 12, 7, 2, 30, 4)]
    rollouts = write_batch(model, prompts, 15, END, torch.zeros(len(prompts)), seed=0)
    assert [r.new for r in rollouts] == [greedy_alone(model, p, 15) for p in prompts]
    lengths = {len(r.new) for r in rollouts}
    assert len(lengths) > 1, "some stop by themselves, or this test shows less than it means to"


def count_rounds(draft: LlamaForTraining, rollout: Rollout, k: int) -> tuple[int, int]:
    """Real speculation: draft k tokens one by one, keep those that agree, add the target's own."""
    drafted = accepted = 0
    place = 1
    while place < len(rollout.new):
        known = rollout.prompt + rollout.new[:place]
        wanted = rollout.new[place : place + k]
        guess: list[int] = []
        for _ in wanted:
            guess.append(int(draft(torch.tensor([known + guess]))[0, -1].argmax()))
        run = next((i for i, (a, b) in enumerate(zip(guess, wanted, strict=True)) if a != b), len(wanted))
        drafted, accepted, place = drafted + len(wanted), accepted + run, place + run + 1
    return drafted, accepted


@pytest.mark.parametrize("k", [1, 4])
def test_acceptance_equals_real_rounds(k: int) -> None:
    model = random_model(32, seed=5)
    draft = random_model(32, seed=5)
    with torch.no_grad():  # close enough to the target to be right sometimes
        for p in draft.parameters():
            p.add_(0.08 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
        rollouts = write_batch(model, [[1, i] for i in range(3, 15)], 30, END, torch.zeros(12), seed=0)
        counts = [count_rounds(draft, r, k) for r in rollouts]
    found = acceptance(draft, rollouts, k)
    assert (found["drafted"], found["accepted"]) == (sum(d for d, _ in counts), sum(a for _, a in counts))
    assert 0.05 < found["rate"] < 0.95, "both outcomes occur, or this test shows less than it means to"


def test_prompts_end_where_the_answer_begins(tokenizer: Tokenizer) -> None:
    chat = Document("d", "s", "", (("user", "one"), ("assistant", "two"), ("user", "three"), ("assistant", "four")))
    ends = set()
    for seed in range(12):
        prompt = prompt_of(tokenizer, chat, 100, random.Random(seed))
        assert prompt is not None and prompt[-1] == tokenizer.token_to_id(ASSISTANT)
        ends.add(len(prompt))
    assert len(ends) == 2, "either answer may be asked for"
    assert prompt_of(tokenizer, chat, 2, random.Random(0)) is None
    text = prompt_of(tokenizer, Document("d", "s", "The cat sat. " * 90), 60, random.Random(0))
    assert text is not None and text[0] == tokenizer.token_to_id(BEGIN) and 16 <= len(text) <= 61
