"""The cache: storage and memory; keys and values in two formats; far tokens in another; shared prefixes."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fixtures_ops import randn as noise
from lawkit import make_engine, random_prompts, run, texts
from proof.mutants import toy_subject

from sameseed import scheme
from sameseed.batch import Rows, build_batch
from sameseed.engine.llm import LLM
from sameseed.engine.memory import block_bytes
from sameseed.errors import ConfigError, RegistryError
from sameseed.kvcache import prefix
from sameseed.kvcache.blocks import BlockManager
from sameseed.kvcache.cache import KVCache
from sameseed.laws import closeness, kernels, textbook
from sameseed.laws.check import PASSED, Effort, run_check
from sameseed.ops import reference
from sameseed.request import SamplingParams, Sequence
from sameseed.tokenizer import Tokenizer

MIB = 2**20


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("fp32", 256), ("bf16", 128), ("int8", 72), ("int8/bf16", 100), ("bf16/int4", 86), ("fp8_e4m3/fp32", 164),
        # Far tokens are stored like near ones: the format neither saves memory yet, nor takes more.
        ("bf16+int4", 128), ("int8+int4", 72), ("int8/bf16+int4", 100),
    ],
)  # fmt: skip
def test_bytes_of_a_cache(name, row):
    """`row`: of a token's key and value in one head of 32, scales included; they are known before it is made."""
    shapes = [(2, 32)] * 3
    size = 4 * 8 * 3 * 2 * row
    assert KVCache(shapes, 4, 8, name).nbytes == 4 * block_bytes(SimpleNamespace(kv_shapes=shapes), name, 8) == size


def test_long_layers_begin_huge_pages_at_different_rows():
    cache = KVCache([(2, 64)] * 30, 1024, 16, "bf16")  # 4 MiB each, of which nothing is in memory
    assert len({layer.k.data_ptr() % 2**21 // 2**14 for layer in cache.layers}) == 30


def test_layers_may_differ_in_shape():
    cache = KVCache([(2, 8), (1, 16), (2, 8)], 5, 4)
    assert [layer.k.shape[2:] for layer in cache.layers] == [(2, 8), (1, 16), (2, 8)]
    assert [len(layers) for _, layers in cache.stacks] == [2, 1]
    assert len({t.data_ptr() for layer in cache.layers for t in (layer.k, layer.v)}) == 6
    assert cache.layers[2].k.data_ptr() == cache.stacks[0][0].k[1].data_ptr()


BAD = {"int9": "did you mean 'int8'", "bf16/int88": "did you mean 'int8'", "bf16+int88": "did you mean 'int8'"}
BAD |= {"bf16/nf4": "cache", "bf16+nf4": "cache", "bf16+int4+int4": "int4"}


@pytest.mark.parametrize("name", BAD)
def test_formats_that_no_cache_has_are_refused(name, pair_folders):
    with pytest.raises((ConfigError, RegistryError), match=BAD[name]):
        LLM(str(pair_folders[0]), kv_format=name)


def resident():
    """Bytes of this process in memory."""
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGESIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
@pytest.mark.parametrize("format", ["fp32", "int8", "int4", "int8/bf16", "bf16+int4"])
def test_rows_take_memory_once_they_are_stored(format):
    before = resident()
    cache = KVCache([(8, 64)] * 4, 8192, 16, format)
    assert cache.nbytes > 200 * MIB
    assert resident() - before < 16 * MIB
    for layer in cache.layers:
        for tensor in (layer.k, layer.v, layer.k_scale, layer.v_scale):
            if tensor is not None:
                assert not tensor[-1].any()
                tensor[:64] = 1
    assert resident() - before < 2 * cache.nbytes * 64 // 8192 + 16 * MIB


PAIRS = ["int8/bf16", "bf16/int4", "fp8_e4m3/fp32", "int4/int8"]


def test_one_name_is_both():
    assert [f.name for f in scheme.kv_formats("int8")] == ["int8", "int8"]
    assert [f.name for f in scheme.kv_formats("int8/bf16")] == ["int8", "bf16"]
    assert scheme.cache_format("int8/int8", "bf16") == "int8", "kernels know it by one name"
    assert (
        scheme.cache_format("int8/bf16", "bf16") == "int8/bf16" and scheme.cache_format("auto/auto", "fp16") == "fp16"
    )


@pytest.mark.parametrize("name", PAIRS)
def test_each_half_is_stored_in_its_own(name):
    keys, values = name.split("/")
    both = KVCache([(2, 32)], 4, 8, name)
    x = torch.randn(2, 5, 2, 32, generator=torch.Generator().manual_seed(1))
    slots = torch.tensor([3, 9, 30, 0, 17], dtype=torch.int32)
    reference.store_kv(x[0], x[1], both.layers[0], slots)
    for half, mine in ((keys, "k"), (values, "v")):
        alone = KVCache([(2, 32)], 4, 8, half)
        reference.store_kv(x[0], x[1], alone.layers[0], slots)
        for part in (mine, f"{mine}_scale"):
            got, want = getattr(both.layers[0], part), getattr(alone.layers[0], part)
            assert (got is None and want is None) or got.view(torch.uint8).equal(want.view(torch.uint8))
    reference.move_kv(both.layers[0], slots[:1], slots[1:2])
    k, v = both.layers[0].k.flatten(0, 1), both.layers[0].v.flatten(0, 1)
    assert k[9].equal(k[3]) and v[9].equal(v[3])


def test_keys_are_rounded_by_channel_and_values_by_token():
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


def test_channels_far_from_zero_keep_their_range_in_4_bits():
    keys, _ = scheme.kv_formats("fp32+int4")
    x = noise(192, 1, 16) + 50.0 * noise(16, seed=1)
    error = (keys.seen(x, 0, 192) - x)[32:64].abs()
    span = x[32:64].amax(0) - x[32:64].amin(0)
    assert (error <= span / 15 * 0.51 + 0.5).all()  # plus the rounding of the lowest value to bfloat16
    assert error.mean() < 0.2


@pytest.mark.parametrize("name", ["bf16+int4", "int8/bf16+int8"])
def test_attention_is_the_textbooks_and_knows_no_company(name, pair_folders):
    """Laws 4 and 1: other sequences, shuffled blocks of any size, passes of 1 to 64 rows."""
    subject = toy_subject(Tokenizer.from_folder(pair_folders[0]), kv=name)
    for what, got, wanted, bound in closeness._attention(subject):
        assert (got.double() - torch.from_numpy(wanted)).abs().max() <= bound, what
    result = run_check(kernels.attention, subject, Effort(1e-9))
    assert result.status == PASSED, result.found.findings


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_texts_do_not_depend_on_drafts_chunks_or_company(temperature, pair):
    """Law 1, for texts long enough to have far tokens that change the text."""
    one = random_prompts(1, seed=5, longest=1)[0]
    prompts = [(p * 40)[:n] for p, n in zip(random_prompts(4, seed=6, longest=30)[1:], (186, 205, 225))] + [one]
    asked = SamplingParams(max_tokens=16, temperature=temperature, seed=3, ignore_eos=True)
    plain = texts(run(make_engine(pair, kv="fp32+int4"), prompts, asked, alone=True))
    assert plain != texts(run(make_engine(pair, kv="fp32"), prompts, asked))
    for method, rows, block in (("none", 12, 4), ("draft_model", 512, 16), ("eagle", 40, 8)):
        engine = make_engine(pair, method, k=5, kv="fp32+int4", rows=rows, block=block)
        assert texts(run(engine, prompts, asked)) == plain, method
        if method == "draft_model":
            assert texts(run(engine, prompts, asked)) == plain, "from the prefix cache"
        assert (engine.metrics.num_accepted_tokens > 0) == (method != "none")


@pytest.mark.parametrize("window", [1, 150, 170, 231])
def test_under_a_window_groups_stay_where_they_are(window):
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


SIZE = 4


def sequence(tokens):
    return Sequence(0, tokens, SamplingParams(), 0)


def computed(blocks, tokens):
    """A sequence whose rows are all certain and stored."""
    seq = sequence(tokens)
    assert blocks.reserve(seq, len(seq))
    seq.num_cached = len(seq)
    blocks.enter(seq, len(seq))
    return seq


def test_an_equal_digest_is_not_believed_alone(monkeypatch):
    alike = SimpleNamespace(sha256=lambda data: SimpleNamespace(digest=lambda: b"the same"))
    monkeypatch.setattr(prefix, "hashlib", alike)
    blocks = BlockManager(10, SIZE)
    computed(blocks, [1, 2, 3, 4, 5])
    assert blocks.adopt(sequence([9, 9, 9, 9, 5])) == 0


def test_the_block_unused_for_longest_goes_first_and_ends_before_beginnings():
    blocks = BlockManager(4, SIZE)
    old, new = computed(blocks, [1] * 8), computed(blocks, [2] * 8)
    order = [old.blocks[1], old.blocks[0], new.blocks[1], new.blocks[0]]
    blocks.release(old)
    blocks.release(new)
    assert blocks.free_blocks == order
    again = sequence([1] * 5)
    assert blocks.adopt(again) == 4
    blocks.release(again)
    taker = sequence([3] * 12)
    blocks.reserve(taker, 12)
    assert taker.blocks == [order[0], order[2], order[3]], "what was used again stays"
    assert len(blocks.prefixes) == 1
    assert blocks.adopt(sequence([2] * 9)) == 0


def test_a_rewind_into_a_shared_block_takes_the_state_back_too():
    blocks, a, b = BlockManager(8, SIZE, num_slots=2), sequence([1] * (2 * SIZE + 1)), sequence([1] * (2 * SIZE + 1))
    blocks.reserve(a, len(a))
    a.num_cached = a.num_settled = 2 * SIZE
    blocks.enter(a, 2 * SIZE)
    assert blocks.adopt(b) == 2 * SIZE == b.num_settled
    b.num_settled = 2 * SIZE - 1
    blocks.rewind(b, 2 * SIZE - 1)
    assert b.num_settled <= b.num_cached < 2 * SIZE
