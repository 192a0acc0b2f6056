"""The embedded pair: `transformers` gives the same greedy text, and every backend and format its stored tokens."""

import json

import pytest
import torch
from fixtures_models import all_logits, backends, embedded as folder, load, oracle
from golden import embedded

from sameseed import ops
from sameseed.tokenizer import Tokenizer

REMEDY = "run `python tests/golden/embedded.py --write` and look at what changed"
every_backend = pytest.mark.parametrize("backend", backends())
every_model = pytest.mark.parametrize("model", ["embedded", "embedded-draft"])
every_format = pytest.mark.parametrize(("weights", "kv_format"), embedded.FORMATS)


@pytest.fixture(scope="module")
def golden():
    folder("embedded")
    if not embedded.FILE.exists():
        pytest.skip(f"{embedded.FILE.name} is not written yet: {REMEDY}")
    stored = json.loads(embedded.FILE.read_text())
    assert stored["weights"] == embedded.weights_hash(), f"{embedded.FILE.name} is of other weights: {REMEDY}"
    tokens = stored["tokens"]
    return tokens


def test_stored_tokens_are_enough(golden):
    assert golden.keys() == {"/".join(pair) for pair in embedded.FORMATS}
    for outputs in golden.values():
        assert len(outputs) == len(embedded.PROMPTS) and sum(map(len, outputs)) >= 200


@every_backend
@every_format
def test_every_backend_gives_the_stored_tokens(weights, kv_format, backend, golden):
    """Each stored token is the backend's own choice after the tokens before it (by law 1, one pass suffices).

    If the backend has no kernel for the format, it uses slow reference code, and only two prompts are tested.
    """
    model = load(folder("embedded"), backend, weights)
    tokenizer = Tokenizer.from_folder(folder("embedded"))
    slow = backend == "reference" or weights not in model.ops.backend.LINEAR_FORMATS
    pairs = list(zip(embedded.PROMPTS, golden[f"{weights}/{kv_format}"], strict=True))
    for text, tokens in pairs[: 2 if slow else None]:
        prompt = tokenizer.chat([{"role": "user", "content": text}])
        logits = all_logits(model, prompt + tokens[:-1], kv_format)[len(prompt) - 1 :]
        assert logits.argmax(-1).tolist() == tokens, REMEDY


@pytest.mark.parametrize(("weights", "kv_format"), [f for f in embedded.FORMATS if f[0] == "bf16"])
def test_the_engine_gives_the_stored_tokens(weights, kv_format, golden):
    """LLM.generate with drafts, all prompts in one batch: the same tokens."""
    llm = embedded.build("auto", weights, kv_format, draft="ngram")
    assert embedded.greedy(llm) == golden[f"{weights}/{kv_format}"], REMEDY


@every_model
def test_transformers_gives_the_same_text(model):
    """Float32 arithmetic on the stored bf16 weights: each of our tokens is the oracle's choice at its place.

    Its own `generate` gives the first text.
    """
    theirs = oracle(folder(model))
    llm = embedded.build("auto", "auto", "fp32", model)
    end = set(llm.engine.runner.model.config.eos_token_ids)
    prompts = [llm.tokenizer.chat([{"role": "user", "content": text}]) for text in embedded.PROMPTS]
    outputs = embedded.greedy(llm)
    with torch.inference_mode():
        for prompt, tokens in zip(prompts, outputs, strict=True):
            logits = theirs(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :]
            choice = logits.argmax(-1).tolist()
            assert tokens == choice, f"{llm.tokenizer.decode(tokens)!r} against {llm.tokenizer.decode(choice)!r}"
            assert len(tokens) == embedded.MAX_TOKENS or tokens[-1] in end
        options = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
        generated = theirs.generate(torch.tensor([prompts[0]]), **options)[0, len(prompts[0]) :]
    assert generated.tolist() == outputs[0][: len(generated)] and len(generated) == min(24, len(outputs[0]))


@every_model
def test_tokenizer_is_that_of_transformers(model):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(folder(model), local_files_only=True)
    ours = Tokenizer.from_folder(folder(model))
    talk = [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": " Who?\n"},
        {"role": "assistant", "content": "Me, 你 🤖."}, {"role": "user", "content": "def f(x):\n    return x\n"},
    ]  # fmt: skip
    for text in (*embedded.PROMPTS, "naïve 你好 🤖\n\n  x", *(m["content"] for m in talk)):
        assert ours.encode(text) == theirs(text)["input_ids"]
        assert ours.decode(ours.encode(text)) == text
    for generation in (True, False):
        rendered = theirs.apply_chat_template(talk, tokenize=False, add_generation_prompt=generation)
        assert ours.render_chat(talk, generation) == rendered
        assert ours.chat(talk, generation) == theirs(rendered, add_special_tokens=False)["input_ids"]


def test_the_pair_shares_its_tokenizer():
    target, draft = (Tokenizer.from_folder(folder(m)).vocabulary() for m in ("embedded", "embedded-draft"))
    assert target == draft


@every_model
def test_config_fits_tokenizer(model):
    """Every token has a row in the embedding, and generation ends at the tokenizer's own end token."""
    loaded = load(folder(model))
    tokenizer = Tokenizer.from_folder(folder(model))
    assert tokenizer.vocab_size <= loaded.config.vocab_size
    assert tokenizer.vocabulary()[tokenizer.special["eos_token"]] in loaded.config.eos_token_ids
    assert {p.dtype for p in loaded.weights.layers[0].qkv.parts.values()} == {torch.bfloat16}
    assert ops.resolve("auto").row_invariant
