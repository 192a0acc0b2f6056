"""Coupled sampling: the token at a position is a pure function of (logits there, parameters, seed, position).

`choose` is argmax for greedy decoding and argmax(log p + g) for sampling, where p is the processed distribution and g
is Gumbel noise (Gumbel, 1954; Maddison et al., 2014) from a counter-based generator keyed by (seed, position, token
id): SplitMix64 (Steele, Lea and Flood, 2014), whose i-th output is a hash of (key, i). Probabilities are float64, and a
row's choice cannot depend on other rows of the batch.

The NumPy code here is the specification. The choices of the native module (csrc/sampling.cpp) are the same, except when
candidates tie up to the last bits of an exponential or a logarithm.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sameseed.batch import GREEDY, Draw
from sameseed.request import SamplingParams, Sequence, TokenLogprob

try:
    from sameseed import _native
except ImportError:
    HAS_NATIVE = False
else:
    HAS_NATIVE = True

Floats = NDArray[np.float64]
NativeArgs = tuple[int, bool, int, bool, float, float, int, float, int]
FAILED = -1  # no token can be chosen: logits are not finite, or every token is ruled out

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1
_ONE, _STEP, _FACTOR_1, _FACTOR_2, _S11, _S27, _S30, _S31 = (
    np.uint64(x) for x in (1, _GOLDEN, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 11, 27, 30, 31)
)
_BELOW_ONE = 1.0 - 2.0**-53
_COLDEST = 1e-200  # lowest divisor: only the best token is left there, and quotients of logits stay finite


def _mix(z: int) -> int:
    """SplitMix64's finalizer on a Python integer."""
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & _MASK
    return z ^ z >> 31


def derive_seed(seed: int, index: int) -> int:
    """Seed of completion `index` of a request with `n` > 1; the first completion keeps the request's seed."""
    return seed if index == 0 else _mix((seed + index * _GOLDEN) & _MASK) >> 1


def noise_key(seed: int, position: int) -> int:
    """Key of the generator's stream at a position. The stream's i-th output (from 1 on) is the noise of token i - 1."""
    return _mix(_mix(seed & _MASK) ^ ((position * 0xD1342543DE82EF95 + 1) & _MASK))


def gumbel_noise(seed: int, position: int, token_ids: NDArray[np.int64]) -> Floats:
    """Standard Gumbel noise float64 [n] for these tokens: a function of (seed, position, token id) and nothing else."""
    key = np.uint64(noise_key(seed, position))
    z = token_ids.astype(np.uint64)  # arrays of integers wrap around without a warning
    z += _ONE
    z *= _STEP
    z += key
    z ^= z >> _S30
    z *= _FACTOR_1
    z ^= z >> _S27
    z *= _FACTOR_2
    z ^= z >> _S31
    z >>= _S11
    noise: Floats = z.astype(np.float64)
    noise += 0.5
    noise *= 2.0**-53
    np.minimum(noise, _BELOW_ONE, out=noise)  # in (0, 1), never 0 or 1: the largest sum would round up
    for _ in range(2):
        np.log(noise, out=noise)
        np.negative(noise, out=noise)
    return noise


@dataclass
class SamplingState:
    """Penalty counts of one sequence, updated as the sequence grows."""

    in_prompt: NDArray[np.bool_]  # [V]
    counts: NDArray[np.int32]  # [V], of output tokens
    num_seen: int  # tokens of the sequence counted so far; maybe fewer than the prompt's while it is scored

    @classmethod
    def of(cls, seq: Sequence, vocab_size: int) -> SamplingState:
        """The sequence's state, counting what has been appended since the last call."""
        state = seq.state
        if not isinstance(state, SamplingState) or state.num_seen > len(seq):
            state = cls(np.zeros(vocab_size, np.bool_), np.zeros(vocab_size, np.int32), 0)
            seq.state = state
        prompt = np.array(seq.token_ids[state.num_seen : seq.num_prompt], np.int64)
        state.in_prompt[prompt[prompt < vocab_size]] = True
        for token in seq.token_ids[max(state.num_seen, seq.num_prompt) :]:
            state.counts[token] += 1
        state.num_seen = len(seq)
        return state


def adjust(logits: NDArray[np.float32], seq: Sequence, path: Seq[int], eos_token_ids: Seq[int]) -> Floats:
    """Logits float64 [V] after allowed and banned tokens, grammar, minimum length, bias and penalties.

    `path`: draft tokens between the sequence's known tokens and this row, counted as if they had been decoded one by
    one. While a prompt is scored, the first of them are prompt tokens.
    """
    params, num_written = seq.params, seq.num_output + len(path)  # less than 0 while a prompt is scored
    row = logits.astype(np.float64)
    if params.allowed_token_ids is not None and num_written >= 0:
        allowed = [t for t in params.allowed_token_ids if t < len(row)]
        kept = row[allowed]
        row[:] = -np.inf
        row[allowed] = kept
    if seq.grammar is not None and num_written >= 0:
        _allow(row, seq.grammar.allowed(seq.output_token_ids, _written(seq, path)))
    banned = list(params.banned_token_ids) if num_written >= 0 else []
    if 0 <= num_written < params.min_tokens:
        banned += [*eos_token_ids, *params.stop_token_ids]
    row[[t for t in banned if t < len(row)]] = -np.inf
    for token, bias in params.logit_bias.items():
        if token < len(row):
            row[token] += bias
    if params.has_penalties:
        _penalize(row, seq, SamplingState.of(seq, len(row)), path)
    return row


def _written(seq: Sequence, path: Seq[int]) -> Seq[int]:
    """The tokens of a path that are output. While a prompt is scored, the rest of the prompt comes before them."""
    return path[max(0, -seq.num_output) :]


def _allow(row: NDArray[np.floating], mask: NDArray[np.bool_]) -> None:
    """Set the logits outside a mask [V] to -inf. V is the target's; a draft model's row may be shorter or longer."""
    if len(mask) != len(row):
        row[len(mask) :] = -np.inf
        mask, row = mask[: len(row)], row[: len(mask)]
    if 2 * np.count_nonzero(mask) > len(mask):
        row[np.flatnonzero(~mask)] = -np.inf
        return
    allowed = np.flatnonzero(mask)
    kept = row[allowed]
    row.fill(-np.inf)
    row[allowed] = kept


def _penalize(row: Floats, seq: Sequence, state: SamplingState, path: Seq[int]) -> None:
    params, counts, in_prompt = seq.params, state.counts, state.in_prompt
    written = _written(seq, path)
    if written:
        counts = counts.copy()
        for token, count in Counter(written).items():
            counts[token] += count
    if len(written) < len(path):
        in_prompt = in_prompt.copy()
        in_prompt[[t for t in path[: -seq.num_output] if t < len(row)]] = True
    seen = counts > 0
    if params.repetition_penalty != 1.0:  # Keskar et al., 2019; prompt and output alike
        index = np.flatnonzero(seen | in_prompt)
        values = row[index]
        row[index] = np.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    index = np.flatnonzero(seen)
    row[index] -= params.frequency_penalty * counts[index] + params.presence_penalty


def needs_adjusting(seq: Sequence, num_path: int) -> bool:
    """Does `adjust` change this sequence's logits after `num_path` drafted tokens?"""
    return seq.grammar is not None or _is_limited(seq, num_path)


def _is_limited(seq: Sequence, num_path: int) -> bool:
    """Does anything but a grammar change the sequence's logits after `num_path` drafted tokens?"""
    p = seq.params
    short = 0 <= seq.num_output + num_path < p.min_tokens
    return p.has_penalties or short or bool(p.logit_bias or p.banned_token_ids) or p.allowed_token_ids is not None


def shaped_by_model(seq: Sequence) -> bool:
    """Does `adjust` leave this sequence's logits as they are, at any depth of a draft?"""
    return not needs_adjusting(seq, max(0, -seq.num_output))


def plain_greedy(seq: Sequence) -> bool:
    """Is this sequence's choice just the argmax of the raw logits, at any depth of a draft?"""
    return seq.params.greedy and shaped_by_model(seq)


def drawable(seq: Sequence) -> bool:
    """May a backend choose this sequence's tokens (`Ops.choose`)? Yes if only temperature and truncation shape them.

    This depends on the request alone: if different libraries' logarithms drew different tokens of one text, the text
    could depend on its drafts.
    """
    p = seq.params
    limits = p.min_tokens or p.logit_bias or p.banned_token_ids or p.allowed_token_ids is not None or p.has_penalties
    return not (limits or seq.grammar is not None or seq.script or p.logprobs is not None)


def drawer(seq: Sequence, num_path: int) -> Draw | None:
    """How `choose` draws the token `num_path` drafted tokens after the sequence; None if it is not `drawable`."""
    return draw_of(seq.params, seq.seed, len(seq) + num_path) if drawable(seq) else None


def draw_of(params: SamplingParams, seed: int, position: int) -> Draw:
    """How the token at a position is drawn from its logits."""
    if params.greedy:
        return GREEDY
    return Draw(noise_key(seed, position), _divisor(params), _floor(params), False, params.top_k, params.top_p)


def _divisor(params: SamplingParams) -> float:
    """The temperature, 1 for greedy."""
    return max(params.temperature, _COLDEST) if params.temperature else 1.0


def _scaled(row: Floats, params: SamplingParams) -> Floats:
    """The row shifted to a maximum of 0, then divided by the temperature (1 for greedy)."""
    scaled: Floats = row - row.max()
    scaled /= _divisor(params)
    return scaled


def _floor(params: SamplingParams) -> float:
    """The lower limit that min-p sets for scaled logits, whose maximum is 0; -inf without min-p."""
    return float(np.log(params.min_p)) if params.min_p > 0.0 else -np.inf


def survivors(row: Floats, params: SamplingParams) -> tuple[NDArray[np.int64], Floats]:
    """Token ids and scaled logits left by temperature, min-p, top-k and top-p, in order of token id. Never empty.

    Ties at the border of top-k are kept.
    """
    scaled = _scaled(row, params)
    floor = _floor(params)
    if 0 < params.top_k < len(scaled):
        floor = max(floor, np.partition(scaled, -params.top_k)[-params.top_k])
    if params.top_p < 1.0:
        weights = np.exp(scaled)
        if floor > -np.inf:
            weights[scaled < floor] = 0.0
        ids = _nucleus(weights, params.top_p)
    else:
        ids = (scaled >= floor if floor > -np.inf else scaled > -np.inf).nonzero()[0]
    return ids, scaled[ids]


def _nucleus(weights: Floats, top_p: float) -> NDArray[np.int64]:
    """The smallest set of likeliest tokens whose share of the weights reaches top_p (Holtzman et al., 2020)."""
    total = weights.sum()
    # Tokens below this bound have less than 1 - top_p together, so they are outside the set and need no sorting.
    likely = weights[weights >= (1.0 - top_p) * total / len(weights)]
    falling = np.sort(likely)[::-1]  # values alone sort several times faster than indices
    reached = np.cumsum(falling[:-1])  # weight of the tokens before the second, the third, ...
    count = 1 + np.count_nonzero(reached < top_p * total)
    border = falling[count - 1]
    ids: NDArray[np.int64] = (weights >= border).nonzero()[0]
    if len(ids) > count:  # of equal weights at the border, the lower token ids stay
        equal = ids[weights[ids] == border]
        ids = np.setdiff1d(ids, equal[count - len(ids) :], assume_unique=True)
    return ids


def choose(logits: NDArray[np.float32], seq: Sequence, path: Seq[int], eos_token_ids: Seq[int]) -> int:
    """The token after the sequence's known tokens and `path`, from logits float32 [V] there; FAILED if none."""
    chosen = native_choice if HAS_NATIVE else numpy_choice
    return chosen(adjusted(logits, seq, path, eos_token_ids), seq.params, seq.seed, len(seq) + len(path))


def adjusted(
    logits: NDArray[np.float32], seq: Sequence, path: Seq[int], eos_token_ids: Seq[int]
) -> NDArray[np.floating]:
    """Logits float32 or float64 [V] as `adjust` gives them; `logits` itself if it would change nothing."""
    if _is_limited(seq, len(path)):
        return adjust(logits, seq, path, eos_token_ids)
    if seq.grammar is None or seq.num_output + len(path) < 0:
        return logits
    row = logits.copy()  # as `adjust` does it, in half the memory
    _allow(row, seq.grammar.allowed(seq.output_token_ids, _written(seq, path)))
    return row


def numpy_choice(logits: NDArray[np.floating], params: SamplingParams, seed: int, position: int) -> int:
    """The token chosen from a row [V] of adjusted logits: the specification."""
    row: Floats = logits.astype(np.float64)
    best = int(row.argmax())  # the first of equal maxima
    if not np.isfinite(row[best]):
        return FAILED
    if params.greedy:
        return best
    ids, values = survivors(row, params)
    noise = gumbel_noise(seed, position, ids)
    return int(ids[(values + noise).argmax()])


def native_choice(row: NDArray[np.floating], params: SamplingParams, seed: int, position: int) -> int:
    """`numpy_choice` in C++ (csrc/sampling.cpp), for a row float32 or float64 [V]."""
    row = np.ascontiguousarray(row)
    return _native.choose(*native_args(row, params, seed, position))


def native_args(row: NDArray[np.floating], params: SamplingParams, seed: int, position: int) -> NativeArgs:
    """The native sampler's arguments for a contiguous row."""
    d = draw_of(params, seed, position)
    where = row.ctypes.data, row.dtype == np.float64, len(row)
    return *where, d.greedy, d.divisor, d.floor, d.top_k, d.top_p, d.key


def probability(logits: NDArray[np.float32], seq: Sequence, token: int) -> float:
    """Probability of `token` by `logits` at the request's temperature (1 for greedy), used as a draft's confidence.

    It affects draft lengths only, so plain logits at temperature 1 use float32, which is several times faster.
    """
    if logits.dtype == np.float32 and _divisor(seq.params) == 1.0:
        with np.errstate(all="ignore"):  # logits that are not finite give no confidence
            shares = np.exp(logits - logits.max())
            return float(shares[token] / shares.sum())
    if HAS_NATIVE:
        row = np.ascontiguousarray(logits)
        return _native.probability(row.ctypes.data, row.dtype == np.float64, len(row), _divisor(seq.params), token)
    return numpy_probability(logits, seq.params, token)


def numpy_probability(logits: NDArray[np.float32], params: SamplingParams, token: int) -> float:
    """The specification of `probability`."""
    row = _scaled(logits.astype(np.float64), params)
    return float(np.exp(row[token]) / np.exp(row).sum())


def token_logprob(
    logits: NDArray[np.float32], seq: Sequence, path: Seq[int], token: int, eos_token_ids: Seq[int]
) -> TokenLogprob:
    """Log-probabilities of the processed distribution: penalties, bias, bans and temperature (1 for greedy) applied.

    Truncation (top-k, top-p, min-p) is left out, so that alternatives outside it still show their probability.
    """
    row = _scaled(adjust(logits, seq, path, eos_token_ids), seq.params)
    row -= np.log(np.exp(row).sum())
    num_top = min(seq.params.logprobs or 0, int((row > -np.inf).sum()))
    top = np.argpartition(-row, num_top - 1)[:num_top] if num_top else np.array([], np.int64)
    top = top[np.lexsort((top, -row[top]))]
    return TokenLogprob(token, float(row[token]), tuple((int(t), float(row[t])) for t in top))
