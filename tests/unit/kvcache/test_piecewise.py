"""Caches whose far tokens are read in fewer bits (KIVI): which are far, how they are rounded, and the laws."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fixtures_ops import randn as noise
from lawkit import Pair, make_engine, random_prompts, run, texts
from proof.mutants import toy_subject

from sameseed import scheme
from sameseed.batch import Rows, build_batch
from sameseed.engine.memory import block_bytes
from sameseed.kvcache.cache import KVCache
from sameseed.laws import closeness, kernels, textbook
from sameseed.laws.check import PASSED, Effort, run_check
from sameseed.models.loader import read_config
from sameseed.ops import reference
from sameseed.request import SamplingParams
from sameseed.tokenizer import Tokenizer

NAMES = ["bf16+int4", "bf16+int8", "int8+int4", "bf16+int4/bf16", "int8/bf16+int4"]


@pytest.mark.parametrize("length", [1, 191, 192, 223, 224, 400])
def test_what_is_far(length: int) -> None:
    """Near are the first 32 tokens, and groups of 32 that hold one of the last 128; all others are far."""
    keys, values = scheme.kv_formats("fp32+int4")
    x = noise(length, 2, 8)
    far = [j >= 32 and j // 32 * 32 + 31 < length - 128 for j in range(length)]
    for half in (keys, values):
        assert (half.seen(x, 0, length) != x).any(-1).any(-1).tolist() == far
    for first in (32, 64, 160):  # under a window, a token is read the same way
        if first < length:
            assert keys.seen(x[first:], first, length).equal(keys.seen(x, 0, length)[first:])


def test_keys_are_rounded_by_channel_and_values_by_token() -> None:
    keys, values = scheme.kv_formats("fp32+int8")
    x = noise(224, 1, 16)
    x[:, :, 3] *= 100.0  # keys have channels like this
    x[70] *= 100.0  # and a large token, in group 2
    k, v = keys.seen(x, 0, 224), values.seen(x, 0, 224)
    steps = x[32:64].abs().amax(0) / 127  # [1, 16]
    assert ((k - x)[32:64].abs() <= steps * 0.51).all()
    steps = x.abs().amax(-1, keepdim=True) / 127
    assert ((v - x)[32:96].abs() <= steps[32:96] * 0.51).all()
    small = [c for c in range(16) if c != 3]
    assert (k - x)[32:64][..., small].norm() < 0.1 * (v - x)[32:64][..., small].norm()


def test_channels_far_from_zero_keep_their_range_in_4_bits() -> None:
    keys, _ = scheme.kv_formats("fp32+int4")
    x = noise(192, 1, 16) + 50.0 * noise(16, seed=1)
    error = (keys.seen(x, 0, 192) - x)[32:64].abs()
    span = x[32:64].amax(0) - x[32:64].amin(0)
    assert (error <= span / 15 * 0.51 + 0.5).all()  # plus the rounding of the lowest value to bfloat16
    assert error.mean() < 0.2


@pytest.mark.parametrize("name", NAMES)
def test_memory_is_that_of_the_near_ones(name: str, pair_folders: tuple[Path, Path]) -> None:
    """Far tokens are stored like near ones: the format neither saves memory yet, nor takes more."""
    near = "/".join(half.partition("+")[0] for half in name.split("/"))
    config = read_config(pair_folders[0])
    assert block_bytes(config, name, 16) == block_bytes(config, near, 16)
    assert KVCache([(2, 32)], 4, 8, name).nbytes == KVCache([(2, 32)], 4, 8, near).nbytes


@pytest.mark.parametrize("name", ["bf16+int4", "int8/bf16+int8"])
def test_attention_is_the_textbooks_and_knows_no_company(name: str, pair_folders: tuple[Path, Path]) -> None:
    """Laws 4 and 1: other sequences, shuffled blocks of any size, passes of 1 to 64 rows."""
    subject = toy_subject(Tokenizer.from_folder(pair_folders[0]), kv=name)
    for what, got, wanted, bound in closeness._attention(subject):
        assert (got.double() - torch.from_numpy(wanted)).abs().max() <= bound, what
    result = run_check(kernels.attention, subject, Effort(1e-9))
    assert result.status == PASSED, result.found.findings


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_texts_do_not_depend_on_drafts_chunks_or_company(temperature: float, pair: Pair) -> None:
    """Law 1, for texts long enough to have far tokens that change the text."""
    one = random_prompts(1, seed=5, longest=1)[0]
    prompts = [(p * 40)[:n] for p, n in zip(random_prompts(4, seed=6, longest=30)[1:], (186, 205, 225))] + [one]
    asked = SamplingParams(max_tokens=16, temperature=temperature, seed=3, ignore_eos=True)
    plain = texts(run(make_engine(pair, kv="fp32+int4"), prompts, asked, alone=True))
    assert plain != texts(run(make_engine(pair, kv="fp32"), prompts, asked, alone=True))
    for method, rows, block in (("none", 12, 4), ("draft_model", 512, 16), ("eagle", 40, 8)):
        engine = make_engine(pair, method, k=5, kv="fp32+int4", rows=rows, block=block)
        assert texts(run(engine, prompts, asked)) == plain, method
        if method == "draft_model":
            assert texts(run(engine, prompts, asked)) == plain, "from the prefix cache"
        assert (engine.metrics.num_accepted_tokens > 0) == (method != "none")


@pytest.mark.parametrize("window", [1, 150, 170, 231])
def test_under_a_window_groups_stay_where_they_are(window: int) -> None:
    """If a window begins within a group of 32, its tokens share scales with tokens outside the window."""
    name, length = "bf16+int4", 300
    layer = KVCache([(2, 16)], 20, 16, name).layers[0]
    x, q = noise(2, length, 2, 16), noise(9, 4, 16, seed=1)
    reference.store_kv(x[0], x[1], layer, torch.arange(length, dtype=torch.int32))
    batch = build_batch([Rows([0] * 9, length - 9, [], [], list(range(19)), False)], 16)
    got = reference.attention(q, layer, batch, 0.25, window)
    k, v = textbook.stored(*(textbook.array(half) for half in x), name)
    far = textbook.distant(k, v, name)
    wanted = textbook.attention(textbook.array(q), k, v, 0.25, length - 9, window, far)
    assert torch.from_numpy(wanted).sub(got).abs().max() < 1e-5
    plain = textbook.attention(textbook.array(q), k, v, 0.25, length - 9, window)
    assert (torch.from_numpy(plain).sub(got).abs().max() > 1e-3) == (window > 140), "some of them are far"
