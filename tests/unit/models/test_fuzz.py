"""Damaged and malicious checkpoints: each loads or is refused with a clear error, in bounded memory and time."""

import copy
import json
import random
import resource
import shutil
import signal
import struct
from contextlib import contextmanager
from pathlib import Path

import pytest
from fixtures_gguf import bpe_keys, write_gguf
from fixtures_layouts import awq, bnb_nf4, ct_config, ct_integers, fp8, gptq, write_layout
from fixtures_models import VARIANTS, random_tensors
from tokenizers import Tokenizer as HFTokenizer, models, pre_tokenizers

from sameseed import ops
from sameseed.errors import SameseedError
from sameseed.models.config import parse_config
from sameseed.models.loader import load_model, load_tokenizer
from sameseed.models.save import save_quantized
from sameseed.scheme import QuantScheme

ROOM = 600 << 20  # bytes of address space that a case may take beyond what the process has
SECONDS = 60  # after which a case counts as hanging
RAW = {**VARIANTS["llama2"].raw, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}


@contextmanager
def bounded():
    """Limits memory to ROOM more bytes, and time to SECONDS."""

    def hang(*_):
        raise AssertionError("hangs")

    (pages,) = (int(x) for x in Path("/proc/self/statm").read_text().split()[:1])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    previous = signal.signal(signal.SIGALRM, hang)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + ROOM, hard))
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def survives(path, tokenizer=False):
    """Whether the checkpoint loads; an error other than SameseedError fails the test."""
    with bounded():
        try:
            load_model(path, ops.resolve("reference"), QuantScheme(), 32)
            if tokenizer:
                load_tokenizer(path).encode("hello there, it's 12")
        except SameseedError:
            return False
    return True


NUMBERS = [0, 1, 2, 7, 8, 31, 127, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1]


def mutated(data, end, rng):
    """Random damage in the first `end` bytes: flips, extreme numbers, lost or doubled pieces, an early end."""
    out = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        at, kind = rng.randrange(end), rng.randrange(7)
        if kind == 0:
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            out[at] = rng.randrange(256)
        elif kind == 2:
            out[at : at + 8] = struct.pack("<Q", rng.choice(NUMBERS))
        elif kind == 3:
            out[at : at + 4] = struct.pack("<I", rng.choice(NUMBERS) & 0xFFFFFFFF)
        elif kind == 4:
            del out[at : at + rng.choice([1, 4, 8, 40])]
        elif kind == 5:
            out[at:at] = out[at : at + rng.choice([1, 4, 8, 40])]
        else:
            del out[rng.randrange(len(out)) :]
        end = max(1, min(end, len(out)))
    return bytes(out)


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory):
    """A small file with all that a GGUF file can have: codes, floats, a tokenizer with its template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    source = HFTokenizer(models.BPE({c: i for i, c in enumerate([*alphabet, "he", "ll"])}, [("h", "e"), ("l", "l")]))
    size = source.get_vocab_size()
    keys = bpe_keys(source, "llama-bpe", {"<s>": 3, "</s>": 3}, bos_token_id=size, eos_token_id=size + 1,
                    chat_template="{{ bos_token }}", add_bos_token=True)  # fmt: skip
    raw = {**RAW, "vocab_size": 260}
    kinds = {"blk.0.ffn_up.weight": "Q4_0", "blk.0.ffn_down.weight": "Q4_1", "token_embd.weight": "F16"}
    tensors = random_tensors(parse_config(raw))
    path = tmp_path_factory.mktemp("fuzz") / "model.gguf"
    return write_gguf(path, raw, tensors, lambda n: kinds.get(n, "Q8_0"), tokenizer=keys).read_bytes()


@pytest.mark.parametrize("seed", range(8))
def test_gguf_headers(seed, gguf_file, tmp_path):
    rng = random.Random(seed)
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_file)
    assert survives(path, tokenizer=True)
    # Half of the damage spares the token list, which is most of the header.
    ends = gguf_file.rindex(b"output.weight") + 60, gguf_file.index(b"tokenizer.ggml.tokens")
    loaded = 0
    for case in range(40):
        path.write_bytes(mutated(gguf_file, ends[case % 2], rng))
        loaded += survives(path, tokenizer=True)
    assert loaded < 40  # some of the damage must matter


LAYOUTS = {
    "gptq": (gptq(act_order=True), {"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {"-:x": {}}}),
    "awq": (awq(), {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}),
    "packed": (ct_integers(4, 64, False), ct_config(4, "int", "group", "pack-quantized", 64, False)),
    "block": (fp8("block"), ct_config(8, "float", "block", "float-quantized")),
    "fp8": (fp8("block", "weight_scale_inv"), {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    "nf4": (bnb_nf4(nested=True), {"quant_method": "bitsandbytes", "load_in_4bit": True}),
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A checkpoint of each layout."""
    found = {}
    for name, (writer, config) in LAYOUTS.items():
        found[name] = tmp_path_factory.mktemp(name)
        write_layout(found[name], writer, config)
    scheme = QuantScheme.parse("qoq")
    raw = json.loads((found["awq"] / "config.json").read_text()) | {"quantization_config": None}
    tensors = random_tensors(parse_config(raw))
    schemes = {n.removesuffix(".weight"): scheme for n in tensors if n.endswith("_proj.weight")}
    stored = ((n, scheme.encode(t) if n.removesuffix(".weight") in schemes else t) for n, t in tensors.items())
    out = tmp_path_factory.mktemp("own") / "out"
    found["own"] = save_quantized(out, found["awq"], stored, schemes)
    return found


NAMES = [*LAYOUTS, "own"]


@pytest.mark.parametrize("name", NAMES)
def test_safetensors_headers(name, folders, tmp_path):
    rng = random.Random(name)
    folder = shutil.copytree(folders[name], tmp_path / "model")
    file = folder / "model.safetensors"
    data = file.read_bytes()
    assert survives(folder)
    end = 8 + struct.unpack("<Q", data[:8])[0]
    for _ in range(25):
        file.write_bytes(mutated(data, end, rng))
        survives(folder)


STRANGE = [
    None, True, False, -1, 0, 1, 3, 4, 8, 33, 2**31, 2**70, 1.5, "", "x", "re:(a|a)*b", "re:[", "linear", [], {},
    {"a": 1}, [0, 128], [2**70, 1], ["Linear"], [None], "pack-quantized", "int-quantized", "channel", "tensor", "block",
    "nf4", "w4a16", "gptq_v2",
]  # fmt: skip


def places(value, at=()):
    """The paths of all values within a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [*([at] if at else []), *(path for k, v in inner for path in places(v, (*at, k)))]


def changed(config, rng):
    """A copy with one or two settings replaced or removed."""
    config = copy.deepcopy(config)
    for _ in range(rng.choice([1, 1, 2])):
        path = rng.choice(places(config))
        parent = config
        for step in path[:-1]:
            parent = parent[step]
        if rng.random() < 0.2:
            del parent[path[-1]]
        else:
            parent[path[-1]] = copy.deepcopy(rng.choice(STRANGE))
        if not config:
            break
    return config


@pytest.mark.parametrize("name", NAMES)
def test_quantization_configs(name, folders, tmp_path):
    rng = random.Random(name)
    folder = shutil.copytree(folders[name], tmp_path / "model")
    raw = json.loads((folder / "config.json").read_text())
    for case in range(25):
        settings = {**raw, "quantization_config": changed(raw["quantization_config"], rng)}
        if case % 5 == 4:
            settings = changed(raw, rng)
        (folder / "config.json").write_text(json.dumps(settings))
        survives(folder)
