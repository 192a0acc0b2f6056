"""The promise against the weights: a textbook decoder in NumPy says what a greedy text should have been."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from sameseed import ops
from sameseed.errors import ConfigError
from sameseed.laws import textbook
from sameseed.models.llama import Llama
from sameseed.models.loader import load_model, load_tokenizer, resolve_model
from sameseed.request import SamplingParams
from sameseed.scheme import QuantScheme
from sameseed.study.promises.evidence import Evidence, promise
from sameseed.study.promises.inquiry import Inquiry
from sameseed.study.promises.reading import ServedText
from sameseed.study.workload import Prompt
from sameseed.tokenizer import Tokenizer

STRANGER = 0.9  # of the tokens are the textbook's choice, or near it; below, the weights are another model's
AT_ONCE = 4  # texts that the textbook reads together
FOLDER, ANOTHER = "the folder of --model", "it holds another model; give the one that is served"
Read = tuple[tuple[int, ...], tuple[int, ...]]  # tokens of a prompt, and of what was written after it
Verdict = tuple[int, bool, bool]  # a token: is it the textbook's choice, or near it?
GREEDY = SamplingParams(ignore_eos=True)


@dataclass(frozen=True)
class Weights:
    """A model's weights with its tokenizer. `share`: of the largest logit, by which the server's may differ."""

    model: Llama
    tokenizer: Tokenizer
    kv_format: str
    share: float
    judged: dict[Read, list[Verdict]] = field(default_factory=dict)  # texts that were judged before

    def encode(self, prompt: Prompt, chat: bool) -> tuple[int, ...]:
        """A prompt's tokens as the server should make them."""
        if chat and prompt.text is not None:
            return tuple(self.tokenizer.chat([{"role": "user", "content": prompt.text}]))
        if chat:
            return prompt.encode(self.tokenizer)
        return tuple(self.tokenizer.encode(prompt.said))

    def tokens(self, prompt: Prompt, chat: bool, answer: ServedText) -> Read | None:
        """A prompt's and an answer's tokens; None where the text alone does not tell which they were."""
        own = answer.prompt_token_ids or self.encode(prompt, chat)
        if answer.token_ids:
            return own, answer.token_ids
        if not answer.text:
            return None
        again = self.tokenizer.encode(answer.text, add_special_tokens=False)
        whole = self.tokenizer.decode(again) == answer.text and len(again) in (answer.num_tokens, answer.num_tokens - 1)
        return (own, tuple(again)) if whole else None


def load_weights(model: str, format: str, kv_format: str, share: float | None) -> Weights:
    """Read a model's folder. Raises ModelLoadError, ConfigError."""
    folder = resolve_model(model)
    llama = load_model(folder, ops.resolve("reference"), QuantScheme.parse(format))
    kv = "bf16" if kv_format == "auto" else kv_format
    return Weights(llama, load_tokenizer(folder), kv, textbook.tolerance(llama, kv) if share is None else share)


def judge(inquiry: Inquiry, heard: list[tuple[int, ServedText]]) -> Iterator[tuple[str, int, int, bool, bool]]:
    """For each token of each different text: where, its place, the token, is it the textbook's choice, or near it."""
    weights = inquiry.weights
    assert weights is not None
    texts: dict[Read, int] = {}
    for index, answer in heard:
        if (both := weights.tokens(inquiry.prompts[index], inquiry.chat, answer)) is not None:
            texts.setdefault(both, index)
    new = [both for both in texts if both not in weights.judged]
    for start in range(0, len(new), AT_ONCE):
        _read(weights, new[start : start + AT_ONCE])
    for both, index in texts.items():
        for at, verdict in enumerate(weights.judged[both]):
            yield inquiry.prompts[index].id, at, *verdict


def _read(weights: Weights, some: list[Read]) -> None:
    """Judge texts. Raises ConfigError for tokens that the weights have not."""
    size = weights.model.config.vocab_size
    if (largest := max(t for both in some for part in both for t in part)) >= size:
        raise ConfigError(f"the server has a token {largest}, and {FOLDER} {size} tokens: {ANOTHER}")
    logits = textbook.forward(weights.model, [(*prompt, *tokens) for prompt, tokens in some], weights.kv_format)
    for (prompt, tokens), rows in zip(some, logits, strict=True):
        near, found = weights.share * float(np.abs(rows).max()), list[Verdict]()
        for at, token in enumerate(tokens):
            row = rows[len(prompt) + at - 1]
            found.append((token, *textbook.judge(row, GREEDY, 0, prompt, tokens[:at], token, (), near)))
        weights.judged[prompt, tokens] = found


def acquaint(inquiry: Inquiry) -> None:
    """Are these the weights that the server has? Raises ConfigError where they cannot be."""
    weights = inquiry.weights
    assert weights is not None
    for prompt, answer in zip(inquiry.prompts, inquiry.alone, strict=True):
        own = weights.encode(prompt, inquiry.chat)
        if answer.prompt_token_ids and answer.prompt_token_ids != own:
            raise ConfigError(f"{FOLDER} makes other tokens of prompt {prompt.id} than the server: {ANOTHER}")
        if answer.num_prompt not in (None, len(own)):
            told = f"{len(own)} tokens of prompt {prompt.id}, the server {answer.num_prompt}"
            raise ConfigError(f"{FOLDER} makes {told}: {ANOTHER}")
    some = [(i, a) for i, a in enumerate(inquiry.alone) if a.error is None]
    close = [is_close for *_, is_close in judge(inquiry, some)]
    if close and sum(close) < STRANGER * len(close):
        raise ConfigError(
            f"of {len(close)} tokens that the server wrote, {sum(close)} are what {FOLDER} would choose: {ANOTHER}, or "
            "its numbers in another --format"
        )


@promise("oracle", "the weights' own text")
async def oracle(inquiry: Inquiry, evidence: Evidence) -> None:
    """Greedy texts are those of a textbook decoder with these weights."""
    assert inquiry.weights is not None
    heard = [*((i, a) for i, a in enumerate(inquiry.alone) if a.error is None), *inquiry.heard]
    shown: set[str] = set()
    at = 0
    for where, number, token, exact, close in judge(inquiry, heard):
        at = 0 if number == 0 else at
        evidence.tokens += 1
        shown.add(where)
        evidence.count("near_ties", close and not exact)
        if not close:
            piece = inquiry.weights.tokenizer.decode([token])
            evidence.differ(f"{where}, token {number}", at, "the textbook's choice", f"token {token}, {piece!r}")
        at += len(inquiry.weights.tokenizer.decode([token]))
    evidence.compared = len(shown)
    evidence.notes.append(f"up to {inquiry.weights.share:g} of the largest logit from the choice is a near tie")
    if heard and not evidence.compared:
        evidence.missing = "the server names no token ids, and its texts do not tell which they were"
