"""Checks against the weights: greedy texts match the textbook's, a wrong token is found, other models are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from lawkit import Pair, write_model

from sameseed.laws import textbook
from sameseed_verify import VerifyError
from sameseed_verify.ask import Asker, RequestBudget
from sameseed_verify.inquiry import BROKEN, HOLDS, Evidence, Inquiry
from sameseed_verify.oracle import acquaint, oracle
from sameseed_verify.prompts import Prompt
from sameseed_verify.reading import ServedText
from sameseed_verify.weights import Weights, load_weights
from sameseed_verify.wire import Endpoint

PROMPTS = [Prompt(str(i), text) for i, text in enumerate(("the sum of", "a whole; ", "def add(a, b)", "café"))]
LENGTH = 16


def written(weights: Weights, prompt: Prompt) -> ServedText:
    """A greedy text as a server with these weights would send it."""
    ids, out = weights.encode(prompt, chat=False), list[int]()
    while len(out) < LENGTH:
        rows = textbook.forward(weights.model, [(*ids, *out)], weights.kv_format)[0]
        out.append(int(rows[-1].argmax()))
    text = weights.tokenizer.decode(out)
    return ServedText(text, "length", LENGTH, len(ids), token_ids=tuple(out), prompt_token_ids=ids)


@pytest.fixture
def inquiry(reference_pair: Pair) -> Inquiry:
    """An inquiry in which each prompt was answered alone."""
    weights = Weights(reference_pair.target, reference_pair.tokenizer, "fp32", textbook.EXACT)
    asker = Asker(httpx.AsyncClient(), Endpoint("http://fake"), RequestBudget(1, 1.0), 1.0)
    made = Inquiry(asker, PROMPTS, LENGTH, 2, 1, weights=weights)
    made.alone = [written(weights, prompt) for prompt in PROMPTS]
    return made


async def judged(inquiry: Inquiry) -> Evidence:
    found = Evidence()
    await oracle(inquiry, found)
    return found


async def test_the_weights_own_texts_hold(inquiry: Inquiry) -> None:
    acquaint(inquiry)
    found = await judged(inquiry)
    assert found.settle("", False) == (HOLDS, "")
    assert (found.compared, found.tokens) == (4, 4 * LENGTH)


async def test_a_wrong_token_is_found_wherever_it_was_heard(inquiry: Inquiry) -> None:
    right = inquiry.alone[2]
    wrong = (right.token_ids[7] + 100) % 300
    ids = (*right.token_ids[:7], wrong)
    inquiry.heard.append((2, replace(right, token_ids=ids)))
    found = await judged(inquiry)
    assert found.settle("", False)[0] == BROKEN and found.differing == 1
    assert found.differences[0].where == "2, token 7" and str(wrong) in found.differences[0].found


async def test_texts_without_token_ids_are_read_again(inquiry: Inquiry) -> None:
    weights = inquiry.weights
    assert weights is not None
    text = "the sum of all parts"
    ids = tuple(weights.tokenizer.encode(text))
    told = ServedText(text, "length", len(ids))
    assert weights.tokens(PROMPTS[0], False, told) == (weights.encode(PROMPTS[0], False), ids)
    assert weights.tokens(PROMPTS[0], False, replace(told, num_tokens=len(ids) + 5)) is None
    inquiry.alone = [replace(a, token_ids=(), num_tokens=99) for a in inquiry.alone]
    assert "do not tell which" in (await judged(inquiry)).missing


def test_a_strangers_folder_is_refused(inquiry: Inquiry, tmp_path: Path) -> None:
    write_model(tmp_path, seed=77)
    own = inquiry.weights
    inquiry.weights = load_weights(str(tmp_path), "auto", "fp32", None)
    assert inquiry.weights.share == textbook.EXACT
    with pytest.raises(VerifyError, match=r"of 64 tokens that the server wrote, \d+ are what .* another model"):
        acquaint(inquiry)
    inquiry.weights = own
    first = inquiry.alone[0]
    for changed, says in (
        (replace(first, prompt_token_ids=(1, 2)), "makes other tokens of prompt 0"),
        (replace(first, prompt_token_ids=(), num_prompt=77), "the server 77"),
        (replace(first, token_ids=(5, 999)), "a token 999"),
    ):
        inquiry.alone[0] = changed
        with pytest.raises(VerifyError, match=says):
            acquaint(inquiry)
