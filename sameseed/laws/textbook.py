"""The textbook: a reference decoder in plain NumPy, without KV cache, batching or speculation; it judges all texts.

It says which token follows at each position, and which others are too close to call. From the package it takes only
weights, the meaning of their formats, and parameters. Arithmetic, noise and sampling are implemented here anew.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence as Seq
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from sameseed import scheme
from sameseed.models import config, decoder
from sameseed.request import SamplingParams
from sameseed.scheme import QuantTensor
from sameseed.tokenizer import Tokenizer

Floats = NDArray[np.float64]
# Tolerances of the engine's logits, as a share of the largest logit. EXACT: sums in float32. HALVES: a cache in 16
# bits. ROUNDED: activations or cache in 8 or 4 bits, where a value between two codes may round either way.
EXACT, HALVES, ROUNDED = 1e-5, 0.003, 0.1
ROWS_AT_ONCE = 2**14  # most rows of a matrix in float64 at a time: 180 MB at a width of 1,536
HALF = "\ufffd"  # shown for a character of which tokens are still missing


# --- arithmetic: rows [T, C] in float64 ---


def array(x: Tensor) -> Floats:
    """A tensor's values in float64."""
    return x.detach().cpu().double().numpy()


def product(x: Floats, w: QuantTensor) -> Floats:
    """x [T, K] times w [O, K] transposed, in the weight's format; rows of x are rounded first if the format says so."""
    if w.activations == "outliers":  # outlier values in float64, all others as int8 below
        kept = np.abs(x) > scheme.OUTLIER
        floats = replace(w, activations=None)
        return product(np.where(kept, 0.0, x), replace(w, activations="int8")) + product(np.where(kept, x, 0.0), floats)
    if w.activations == "int8":  # codes times absmax / 127 for each group of a row; float32, as the format says
        parts = x.astype(np.float32).reshape(len(x), -1, w.group)
        largest = np.abs(parts).max(-1, keepdims=True)
        factor = np.float32(127) / np.maximum(largest, np.float32(scheme.SMALLEST))
        codes = np.where(largest >= scheme.SMALLEST, np.rint(parts * factor), 0.0)
        x = (codes.astype(np.float64) * (largest / np.float32(127))).reshape(x.shape)
    elif w.activations is not None:
        x = array(scheme.float_rows(torch.from_numpy(x).float(), w))
    return through(x, w)


def through(x: Floats, w: QuantTensor, of: Callable[[Floats], Floats] = lambda values: values) -> Floats:
    """x [T, K] times `of` the stored values of w [O, K], transposed; a head of many words is decoded in pieces."""
    fmt = scheme.get(w.format)
    if w.shape[0] <= ROWS_AT_ONCE:
        return x @ of(array(fmt.decode(w))).T
    device, found = next(iter(w.parts.values())).device, []
    for first in range(0, w.shape[0], ROWS_AT_ONCE):
        rows = torch.arange(first, min(first + ROWS_AT_ONCE, w.shape[0]), device=device)
        found.append(x @ of(array(fmt.decode_rows(w, rows))).T)
    return np.concatenate(found, -1)


def rms_norm(x: Floats, weight: Tensor, eps: float) -> Floats:
    """Rows divided by their root mean square, times weight."""
    size: Floats = np.sqrt((x * x).mean(-1, keepdims=True) + eps)
    return x / size * array(weight)


def silu_mul(gate_up: Floats) -> Floats:
    """silu of the first half of each row, times the second half."""
    gate, up = np.split(gate_up, 2, axis=-1)
    out: Floats = gate / (1 + np.exp(-gate)) * up
    return out


def rope(x: Floats, positions: Seq[int], table: Tensor) -> Floats:
    """x [T, H, D] rotated by position; table [P, D]: cosines, then sines."""
    cos, sin = np.split(array(table[list(positions)])[:, None, :], 2, axis=-1)
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def attention(
    q: Floats,
    k: Floats,
    v: Floats,
    scale: float,
    start: int = 0,
    window: int | None = None,
    far: Seq[Floats] | None = None,
) -> Floats:
    """Causal attention of q [T, H, D], at positions from `start` on, over k, v [S, Hk, D]; returns [T, H, D].

    `far`: keys and values as they are read for distant tokens (`distant`); None where the cache has a single format.
    """
    at, place = start + np.arange(len(q))[:, None], np.arange(len(k))
    distance = at - place
    # Distant tokens: groups of 32 that end before the query's last 128 tokens begin; never the first group.
    away = (place // 32 > 0) & ((place // 32 + 1) * 32 + 128 <= at + 1)
    group, q = q.shape[1] // k.shape[1], q.transpose(1, 0, 2)
    keys, values, *others = (np.repeat(x, group, 1).transpose(1, 0, 2) for x in (k, v, *(far or ())))  # [H, S, D]
    scores = q @ keys.transpose(0, 2, 1) * scale  # [H, T, S]
    if far is not None:
        scores = np.where(away, q @ others[0].transpose(0, 2, 1) * scale, scores)
    seen = (distance >= 0) & (distance < (window or len(k) + 1))
    scores = np.where(seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    out: Floats = weights @ values if far is None else (weights * ~away) @ values + (weights * away) @ others[1]
    return out.transpose(1, 0, 2)


def stored(k: Floats, v: Floats, kv_format: str) -> list[Floats]:
    """Keys and values [T, Hk, D] after encoding and decoding in the cache format."""
    both = zip(scheme.kv_formats(kv_format), (k, v))
    return [array(fmt.decode_kv(*fmt.encode_kv(torch.from_numpy(x).float()))) for fmt, x in both]


def distant(k: Floats, v: Floats, kv_format: str) -> list[Floats] | None:
    """Stored keys and values [S, Hk, D] of one text as read for distant tokens; None if the format is not piecewise."""

    def read(x: Floats, half: scheme.Format) -> Floats:
        whole = len(x) // 32 * 32  # tokens of an incomplete group all count as near
        if not isinstance(half, scheme.Piecewise) or not whole:
            return x
        return np.concatenate([array(half.far.reread(torch.from_numpy(x[:whole]).float(), half.keys)), x[whole:]])

    halves = scheme.kv_formats(kv_format)
    return [read(x, half) for x, half in zip((k, v), halves)] if "+" in kv_format else None


def queries(q: Floats, scale: float, kv_format: str) -> Floats:
    """Queries [T, H, D] times `scale`, rounded as attention over a cache in this format rounds them."""
    dtype = scheme.kv_formats(kv_format)[0].query_dtype
    return (
        q * scale if dtype is torch.float32 else array(scheme.round_queries(torch.from_numpy(q).float() * scale, dtype))
    )


def forward(model: decoder.Decoder, texts: Seq[Seq[int]], kv_format: str, starts: Seq[int] = ()) -> list[Floats]:
    """Logits [S, V] after every token of each text, or after those from its place in `starts` on."""
    c, w, ops = config.llama_only(model.config, "the textbook"), model.weights, model.ops

    def linear(x: Floats, stack: QuantTensor | tuple[QuantTensor, ...], bias: Tensor | None = None) -> Floats:
        parts = stack if isinstance(stack, tuple) else (stack,)
        out = np.concatenate([product(x, ops.unpack(part)) for part in parts], -1)
        return out if bias is None else out + array(bias)

    cuts = np.cumsum([len(text) for text in texts])[:-1]
    positions = [i for text in texts for i in range(len(text))]
    token_ids = torch.tensor([t for text in texts for t in text], device=model.device)
    embedding = ops.unpack(w.embedding)
    x = array(scheme.get(embedding.format).decode_rows(embedding, token_ids))  # [T, C], text after text
    for i, layer in enumerate(w.layers):
        rows = linear(rms_norm(x, layer.input_norm, c.rms_eps), layer.qkv, layer.qkv_bias)
        heads = rows.reshape(len(x), -1, c.head_dim)
        q, k, v = np.split(heads, (c.num_heads, c.num_heads + c.num_kv_heads), axis=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = rms_norm(q, layer.q_norm, c.rms_eps), rms_norm(k, layer.k_norm, c.rms_eps)
        q, k = (rope(part, positions, model.rope) for part in (q, k))
        q, (k, v) = queries(q, c.head_dim**-0.5, kv_format), stored(k, v, kv_format)
        each = zip(np.split(q, cuts), np.split(k, cuts), np.split(v, cuts), strict=True)
        mixed = np.concatenate([attention(*qkv, 1.0, 0, c.windows[i], distant(*qkv[1:], kv_format)) for qkv in each])
        x = x + linear(mixed.reshape(len(x), -1), layer.o, layer.o_bias)
        gate_up = linear(rms_norm(x, layer.post_norm, c.rms_eps), layer.gate_up, layer.gate_up_bias)
        x = x + linear(silu_mul(gate_up), layer.down, layer.down_bias)
    ends = [part[start:] for part, start in zip(np.split(x, cuts), starts or [0] * len(texts), strict=True)]
    logits = linear(rms_norm(np.concatenate(ends), w.norm, c.rms_eps), w.lm_head)
    return np.split(logits, np.cumsum([len(part) for part in ends])[:-1])


def tolerance(model: decoder.Decoder, kv_format: str) -> float:
    """The tolerance that the model and its cache need: EXACT, HALVES or ROUNDED."""
    if any(m.activations is not None for m in model.weights.matrices):
        return ROUNDED
    return {"fp32": EXACT, "bf16": HALVES, "fp16": HALVES}.get(kv_format, ROUNDED)


# --- sampling: one row of logits [V] ---


def adjusted(
    logits: ArrayLike,
    params: SamplingParams,
    prompt: Seq[int],
    output: Seq[int],
    eos: Seq[int] = (),
    grammar: Collection[int] | None = None,
) -> Floats:
    """Logits after restrictions, bias and penalties, given prompt and output; `grammar`: the tokens that it allows."""
    row = np.array(logits, np.float64)
    for few in (params.allowed_token_ids, grammar):
        if few is not None:
            ruled_out = np.ones(len(row), np.bool_)
            ruled_out[list(few)] = False
            row[ruled_out] = -np.inf
    row[list(params.banned_token_ids)] = -np.inf
    if len(output) < params.min_tokens:
        row[[*eos, *params.stop_token_ids]] = -np.inf
    for token, bias in params.logit_bias.items():
        row[token] += bias
    for token in {*prompt, *output}:
        repeat = params.repetition_penalty
        row[token] = row[token] / repeat if row[token] > 0 else row[token] * repeat
    for token, count in Counter(output).items():
        row[token] -= params.frequency_penalty * count + params.presence_penalty
    return row


def kept(row: ArrayLike, params: SamplingParams, slack: float = 0.0) -> Floats:
    """Logits over the temperature, the largest at 0; -inf for tokens that min-p, top-k and top-p drop.

    `slack` moves every threshold: a positive value lowers the thresholds, so that more tokens are kept.
    """
    values: Floats = np.array(row, np.float64)
    scaled: Floats = (values - values.max()) / max(params.temperature, 1e-200)
    border = np.log(params.min_p) - slack if params.min_p else -np.inf
    if params.top_k > 0:  # 0 or -1: off
        place = len(scaled) - min(params.top_k, len(scaled))
        border = max(border, np.partition(scaled, place)[place] - slack)
    scaled[scaled < min(border, 0.0)] = -np.inf
    if params.top_p < 1.0:
        weights = np.exp(scaled)
        able = np.flatnonzero(weights)  # what dropped out before need not be sorted
        order = able[np.argsort(-weights[able], kind="stable")]  # likeliest first; of equals, the lower id first
        before = np.cumsum(weights[order]) - weights[order]
        inside = before < max(params.top_p + slack, 0.0) * weights.sum()
        inside[0] = True
        border = scaled[order[inside][-1]] - slack
        if slack > 0:
            scaled[scaled < border] = -np.inf
        else:
            scaled[order[~inside]] = -np.inf
            scaled[weights == 0.0] = -np.inf
    return scaled


def probabilities(row: ArrayLike, params: SamplingParams) -> list[float]:
    """The distribution that a token is drawn from, given adjusted logits; temperature 0 puts all on the argmax."""
    scaled = np.array(row, np.float64)
    if params.temperature == 0.0:
        return [float(t == scaled.argmax()) for t in range(len(scaled))]
    weights = np.exp(kept(scaled, params))
    found: list[float] = (weights / weights.sum()).tolist()
    return found


def gumbel(seed: int, position: int, count: int) -> Floats:
    """Gumbel noise of tokens 0 .. count - 1; its uniforms are SplitMix64's outputs under a key of seed and position."""

    def mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
        z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
        return z ^ z >> np.uint64(31)

    place = (position * 0xD1342543DE82EF95 + 1) % 2**64
    key = mix(mix(np.array([seed % 2**64], np.uint64)) ^ np.uint64(place))
    bits = mix(key + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(11)
    uniform = np.minimum((bits + 0.5) * 2.0**-53, 1 - 2.0**-53)
    noise: Floats = -np.log(-np.log(uniform))
    return noise


def judge(
    logits: ArrayLike,
    params: SamplingParams,
    seed: int,
    prompt: Seq[int],
    output: Seq[int],
    token: int,
    eos: Seq[int] = (),
    near: float = 0.0,
    grammar: Collection[int] | None = None,
) -> tuple[bool, bool]:
    """Is `token` the choice after prompt and output, and is it within `near` (in logits) of being the choice?"""
    row = adjusted(logits, params, prompt, output, eos, grammar)
    if not np.isfinite(row[token]):  # ruled out
        return False, False
    if params.temperature == 0.0:
        return int(row.argmax()) == token, bool(row[token] >= row.max() - 2 * near)
    noise = gumbel(seed, len(prompt) + len(output), len(row))
    if int((kept(row, params) + noise).argmax()) == token:
        return True, True
    slack = 2 * near / params.temperature
    loose, strict = (kept(row, params, by) + noise for by in (slack, -slack))
    return False, bool(np.isfinite(loose[token]) and loose[token] >= strict.max() - slack)


def ends(
    params: SamplingParams, prompt: Seq[int], output: Seq[int], texts: Seq[str], eos: Seq[int], longest: int
) -> int | None:
    """How many tokens of `output` the text keeps; None if nothing in it ends the text.

    texts[i]: the first i + 1 tokens decoded.
    """
    for i, token in enumerate(output):
        if token in params.stop_token_ids or (token in eos and not params.ignore_eos):
            return i + 1
        if i + 1 >= params.min_tokens and stopped(params, texts[: i + 1]) is not None:
            return i + 1
        if i + 1 >= params.max_tokens or len(prompt) + i + 1 >= longest:
            return i + 1
    return None


def spelt(tokenizer: Tokenizer, prompt: Seq[int], output: Seq[int], skip_special_tokens: bool = True) -> str:
    """What the output adds to the prompt's text; where it completes its last character, that character too."""
    known, whole = (tokenizer.decode(ids, skip_special_tokens) for ids in (prompt, [*prompt, *output]))
    differs = (i for i, (a, b) in enumerate(zip(known, whole, strict=False)) if a != b)
    return whole[next(differs, min(len(known), len(whole))) :]


def stopped(params: SamplingParams, texts: Seq[str]) -> int | None:
    """Where the first stop string begins that ends within the last token of `texts[-1]`; None if there is none.

    texts[i]: the first i + 1 tokens decoded. A partial character at the end belongs to the token that completes it.
    """
    text, before = (t.rstrip(HALF) for t in (texts[-1], texts[-2] if len(texts) > 1 else ""))
    found = [text.find(stop, max(0, len(before) - len(stop) + 1)) for stop in params.stop]
    return min((at for at in found if at >= 0), default=None)


def allowed(choices: Collection[str], pieces: Mapping[int, str], eos: Collection[int], output: Seq[int]) -> list[int]:
    """Tokens that may follow `output` where the text must become one of `choices` and then end; none if no choice fits.

    pieces[t]: what token t spells.
    """
    if any(t not in pieces for t in output):
        return []
    said = "".join(pieces[t] for t in output)
    rest = {c[len(said) :] for c in choices if c.startswith(said)}
    able = [t for t, piece in pieces.items() if any(r.startswith(piece) for r in rest)]
    return sorted([*able, *(eos if "" in rest else ())])
