"""Checkpoints that cannot be read are refused with tensor, file and remedy; none of their code is ever run."""

import json
import struct
from math import inf, nan
from pathlib import Path

import pytest
import torch
from fixtures_models import (
    VARIANTS,
    all_logits,
    fails,
    load,
    prompt,
    random_tensors,
    read_tensors,
    write_checkpoint,
    write_config,
    write_shards,
    write_tensors,
)
from safetensors.torch import load_file, save_file

from sameseed import ops
from sameseed.errors import ConfigError, ModelLoadError
from sameseed.models import loader, weights as weights_module
from sameseed.models.checkpoint import Checkpoint
from sameseed.models.config import own_draft, parse_config
from sameseed.models.loader import read_config, resolve_model, target_scheme
from sameseed.models.safetensors_file import SafetensorsFile
from sameseed.models.weights import read_weights, weight_bytes
from sameseed.quantize._run import QuantizePlan, quantize
from sameseed.scheme import QuantScheme


@pytest.fixture
def folder(tmp_path):
    """A sound checkpoint for tests to damage."""
    return write_checkpoint(tmp_path / "model", VARIANTS["llama3.2"])


def weights(folder):
    return folder / "model.safetensors"


def refused(folder, *words):
    fails(lambda: load(folder), *words)


SOME = "model.layers.1.mlp.up_proj.weight"
SHAPES = (72, 47), (73, 48), (48, 72), (72 * 48,), (1, 72, 48)  # all wrong
TYPES = torch.float64, torch.int32, torch.int8, torch.bool, torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("tensors", "settings", "words"),
    [
        ({SOME: None}, {}, [SOME, "missing", "1 in all", "config.json"]),
        ({}, {"tie_word_embeddings": False}, ["lm_head.weight", "missing"]),
        ({SOME: None, f"base_model.{SOME}": torch.zeros(1)}, {}, [SOME, "missing", f"base_model.{SOME} is there"]),
        ({f"{SOME}.bias": torch.zeros(72)}, {}, ["unexpected", f"{SOME}.bias", "LlamaForCausalLM"]),
        ({}, {"num_hidden_layers": 2}, ["unexpected", "model.layers.2."]),
        *(({SOME: torch.zeros(s)}, {}, [SOME, str([*s]), "[72, 48]"]) for s in SHAPES),
        *(({SOME: torch.ones(72, 48).to(t)}, {}, [SOME, "F32, BF16, F16"]) for t in TYPES),
    ],
)
def test_tensors_that_config_json_does_not_want(tensors, settings, words, folder):
    raw = json.loads((folder / "config.json").read_text())
    write_config(folder, {**raw, **settings})
    write_tensors(folder, {n: t for n, t in (read_tensors(folder) | tensors).items() if t is not None})
    refused(folder, str(folder), *words)


@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"])
def test_tensors_that_can_be_computed_are_ignored(name, folder):
    """A stored copy of a tied LM head, and the rotary frequencies that old checkpoints stored."""
    before = all_logits(load(folder), prompt(5))
    tensors = read_tensors(folder)
    extra = tensors["model.embed_tokens.weight"].clone() if name == "lm_head.weight" else torch.ones(8)
    write_tensors(folder, tensors | {name: extra})
    assert all_logits(load(folder), prompt(5)).equal(before)


@pytest.mark.parametrize("quantized", [False, True])
def test_a_head_that_is_no_copy_is_read_although_config_json_ties_it(quantized, folder):
    """As transformers does. One row differs, or the embedding is quantized."""
    raw, tensors = json.loads((folder / "config.json").read_text()), read_tensors(folder)
    head = tensors[name := "model.embed_tokens.weight"].clone()
    if quantized:
        raw["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_8bit": True}
        scales = tensors[name.replace("weight", "SCB")] = head.abs().amax(1)
        tensors[name] = (head / scales[:, None] * 127).round().char()
    else:
        head[-1] *= -1
    write_tensors(folder, tensors | {"lm_head.weight": head})
    write_config(folder, {**raw, "tie_word_embeddings": True})
    found = all_logits(load(folder), prompt(5))
    write_config(folder, raw | {"tie_word_embeddings": False})
    assert found.equal(all_logits(load(folder), prompt(5)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("values", [[nan], [inf], [-inf], [inf, -inf]], ids=str)  # the sum of the last is NaN
@pytest.mark.parametrize("name", [SOME, "model.norm.weight", "model.embed_tokens.weight"])
def test_weights_that_are_no_numbers(name, values, dtype, folder):
    tensors = read_tensors(folder)
    tensors[name] = tensors[name].to(dtype)
    tensors[name].view(-1)[17 : 17 + len(values)] = torch.tensor(values)
    write_tensors(folder, tensors)
    refused(folder, name, "model.safetensors", "NaN or infinity")


def test_large_weights_are_no_infinity(folder):
    """A sum beyond the type's range is no error: each weight is finite."""
    tensors = {n: t.half() for n, t in read_tensors(folder).items()}
    tensors[SOME] = torch.full((72, 48), 60000.0, dtype=torch.float16)
    write_tensors(folder, tensors)
    assert load(folder).weights.layers[1].gate_up.parts["weight"].max() == 60000


@pytest.mark.parametrize("other", ["pytorch_model.bin", "consolidated.00.pth", "model.pt", "model.ckpt"])
def test_pickles_are_never_opened(other, folder):
    """An opened pickle would create the trace file."""
    trace = folder / "trace"
    weights(folder).unlink()
    refused(folder, str(folder), "no *.safetensors")
    (folder / other).write_bytes(f"cposix\nsystem\n(S'touch {trace}'\ntR.".encode())
    refused(folder, str(folder), other, "pickle", "safetensors")
    (folder / "adapter_model.safetensors").touch()
    refused(folder, "no *.safetensors")
    (folder / "config.json").rename(folder / "adapter_config.json")
    refused(folder, "is an adapter; merge it")
    assert not trace.exists()


def test_code_of_a_checkpoint_is_never_run(folder):
    trace = folder / "trace"
    code = f"open({str(trace)!r}, 'w').close()\nclass Evil:\n    pass\n"
    for name in ("modeling_evil.py", "configuration_evil.py", "__init__.py", "tokenization_evil.py"):
        (folder / name).write_text(code)
    raw = json.loads((folder / "config.json").read_text())
    auto = {"AutoConfig": "configuration_evil.Evil", "AutoModelForCausalLM": "modeling_evil.Evil"}
    write_config(
        folder, raw | {"auto_map": auto, "trust_remote_code": True, "custom_pipelines": {"x": {"impl": "e.E"}}}
    )
    assert all_logits(load(folder), prompt(5)).shape == (5, 97)  # the file is an ordinary Llama and runs as one
    write_config(folder, {**raw, "auto_map": auto, "architectures": ["EvilForCausalLM"]})
    refused(folder, "EvilForCausalLM", "not supported")
    assert not trace.exists()


@pytest.fixture
def sharded(folder):
    write_shards(folder, read_tensors(folder))
    weights(folder).unlink()
    load(folder)  # sound so far
    return folder


def index(folder):
    return folder / "model.safetensors.index.json"


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", "[" * 100_000, '{"weight_map": {}}', '{"weight_map": 3}', '{"weight_map": {"a": 1, "b": "c"}}',
     '{"weight_map": {"a": ["b"]}}', "1" * 5000],
    ids=lambda t: t[:40],
)  # fmt: skip
def test_an_index_that_is_none(text, sharded):
    index(sharded).write_text(text)
    refused(sharded, str(sharded))


def test_weights_beside_those_of_an_index_are_the_ones_that_transformers_reads(sharded):
    save_file(random_tensors(parse_config(VARIANTS["llama3.2"].raw)), sharded / "model.safetensors")
    for shard in sharded.glob("model-*"):
        shard.write_bytes(b"")
    load(sharded)


LAST = "model-00003-of-00003.safetensors"


@pytest.mark.parametrize(
    "file",
    [LAST, "model-9.safetensors", "../outside.safetensors", "/etc/passwd", "sub/a", "..", "", "a\x00b"],
    ids=repr,
)
def test_an_index_that_names_another_file(file, sharded):
    """One that has not the tensor, none, or one outside the folder."""
    save_file(random_tensors(parse_config(VARIANTS["llama3.2"].raw)), sharded.parent / "outside.safetensors")
    content = json.loads(index(sharded).read_text())
    assert content["weight_map"][SOME] != LAST
    index(sharded).write_text(json.dumps({"weight_map": content["weight_map"] | {SOME: file}}))
    refused(sharded, str(sharded), "index")


@pytest.mark.parametrize("made", ["folder", "sharded"])
def test_the_same_weights_under_other_names_are_not_read(made, request):
    """Mistral's repositories hold them a second time."""
    model = request.getfixturevalue(made)
    save_file({"layers.0.attention.wq.weight": torch.ones(3)}, model / "consolidated.safetensors")
    load(model)


def test_a_tensor_in_two_files_is_refused(folder):
    """Nothing says which of the two the model has; the order of the files does not."""
    weights(folder).rename(folder / "a.safetensors")
    save_file({SOME: torch.ones(72, 48)}, folder / "b.safetensors")
    refused(folder, SOME, "a.safetensors", "b.safetensors")


def test_the_index_decides_which_file_a_tensor_is_read_from(sharded):
    places = json.loads(index(sharded).read_text())["weight_map"]
    before = all_logits(load(sharded), prompt(5))
    for file in sorted(set(places.values()) - {places[SOME]}):
        save_file(load_file(sharded / file) | {SOME: torch.ones(72, 48)}, sharded / file)
    assert all_logits(load(sharded), prompt(5)).equal(before)


def test_a_folder_is_itself(folder, monkeypatch):
    assert resolve_model(str(folder)) == folder
    monkeypatch.chdir(folder.parent)
    assert resolve_model("model") == Path("model")
    monkeypatch.setenv("HOME", str(folder.parent))
    assert resolve_model("~/model") == folder
    hidden = folder / "hidden.gguf"
    hidden.touch(mode=0)  # its reader tells why it cannot be read
    assert resolve_model(str(hidden)) == hidden


@pytest.mark.parametrize(
    "name", ["nowhere", "./org/name", "/no/such/folder", "~/no-such", "~nobody-here/model", "a/b/c", "", "a\x00b"]
)
def test_unknown_path(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *a, **k: pytest.fail("asked the hub"))
    with pytest.raises(ModelLoadError) as caught:
        resolve_model(name)
    for word in (repr(name), "folder", "org/name", "embedded"):
        assert word in str(caught.value)
    assert own_draft(name) == "none"


def test_hub_id_downloads_no_code_and_no_pickle(folder, monkeypatch):
    from huggingface_hub.utils import filter_repo_objects

    asked = {}

    def download(name, **options):
        asked.update(options, name=name)
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert resolve_model("org/name") == folder
    assert asked["name"] == "org/name"
    allowed, ignored = asked["allow_patterns"], asked["ignore_patterns"]
    wanted = [
        "config.json", "tokenizer.json", "tokenizer.model", "chat_template.jinja", "LICENSE.txt",
        "model-00001-of-00002.safetensors",
    ]  # fmt: skip
    others = [
        "modeling_evil.py", "pytorch_model.bin", "model.pth", "consolidated.safetensors", "original/model.safetensors",
        "original/tokenizer.model",
    ]  # fmt: skip
    assert list(filter_repo_objects(wanted + others, allow_patterns=allowed, ignore_patterns=ignored)) == wanted


def entry(begin, end, **changes):
    return {"dtype": "F32", "shape": [(end - begin) // 4], "data_offsets": [begin, end]} | changes


@pytest.mark.parametrize(
    "entries",
    [
        {"a": entry(0, 8), "b": entry(4, 12)}, {"a": entry(0, 4), "b": entry(8, 12)}, {"a": entry(0, 8)},
        {"a": entry(0, 16)}, {"a": entry(0, 12, shape=[4])}, {"a": entry(0, 12, shape=[2**40, 2**40])},
        {"a": entry(0, 12, dtype="F33")}, {"a": [0, 12]}, b"\xff{}", b"[" * 100_000,
        b'{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,12]},"a":{"dtype":"F32","shape":[3],"data_offsets":[0,12]}}',
    ],
    ids=lambda e: str(e)[:60],
)  # fmt: skip
def test_headers_that_contradict_the_file(entries, folder):
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    weights(folder).write_bytes(struct.pack("<Q", len(text)) + text + bytes(12))
    refused(folder, str(weights(folder)), "download it again")


@pytest.mark.parametrize(
    "data",
    [b"\x80\x04\x95 a pickle", b"<html>404</html>" * 10, struct.pack("<Q", 2**60) + b"{}", 0, 4, 8, 100, 3000, -1],
    ids=str,
)
def test_files_that_are_another_kind_or_cut_short(data, folder):
    weights(folder).write_bytes(weights(folder).read_bytes()[:data] if isinstance(data, int) else data)
    refused(folder, str(weights(folder)), "download it again")


@pytest.mark.parametrize("length", [2**31, 2**24 + 1])
def test_long_headers_are_not_read_into_memory(length, folder, monkeypatch):
    """16 MiB hold the header of 100 000 tensors; parsing a longer JSON text can take gigabytes."""
    with weights(folder).open("wb") as file:
        file.write(struct.pack("<Q", length) + b"{")
        file.truncate(length + 100)  # a sparse file as long as its header says
    monkeypatch.setattr(SafetensorsFile, "read", lambda *a: pytest.fail("read the header"))
    refused(folder, f"header of {length} bytes")


def test_a_file_cut_while_it_is_read(folder):
    with Checkpoint(folder) as checkpoint:
        weights(folder).write_bytes(weights(folder).read_bytes()[:-5000])
        with pytest.raises(ModelLoadError, match=r"ends before byte .* was it changed"):
            read_weights(parse_config(VARIANTS["llama3.2"].raw), checkpoint, QuantScheme(), ops.resolve("reference"))


FORMATS = ["bf16", "w8a8", "w8a16-g32", "w4a8", "w4a16-asym", "nf4", "fp8"]


def test_stacked_tensors_of_two_types(folder):
    """Half of a stacked weight is bf16 and half fp16: only float32 holds both."""
    tensors = read_tensors(folder)
    tensors = {n: t.half() if "gate_proj" in n else t.bfloat16() for n, t in tensors.items()}
    write_tensors(folder, tensors)
    w = load(folder).weights
    assert {x.format for x in (w.embedding, w.layers[0].qkv, w.layers[0].down)} == {"bf16"}
    assert w.layers[0].gate_up.format == "fp32"
    stacked = [tensors[f"model.layers.0.mlp.{n}_proj.weight"].float() for n in ("gate", "up")]
    assert w.layers[0].gate_up.parts["weight"].equal(torch.cat(stacked))


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ("w4a8-g32", ["groups of 32 do not divide", "leave the"]),
        ("q4_k-a8", ["blocks of 256 do not divide", "w4a8"]),
        ("q5_0-a8", ["blocks of 32 do not divide", "w4a8"]),
    ],
)
def test_a_group_that_does_not_divide_is_refused_before_any_weight_is_read(weights, words, folder, monkeypatch):
    monkeypatch.setattr(Checkpoint, "rows", lambda *a: pytest.fail("read a weight"))
    monkeypatch.setattr(Checkpoint, "tensor", lambda *a: pytest.fail("read a weight"))
    with pytest.raises(ConfigError) as caught:
        load(folder, weights=weights)
    for word in ("model.embed_tokens.weight [97, 48]", weights, "48", *words):
        assert word in str(caught.value)


def test_damage_is_found_in_any_chunk(folder, monkeypatch):
    monkeypatch.setattr(weights_module, "CHUNK", 1)
    tensors = read_tensors(folder)
    tensors[SOME][70, 3] = torch.nan
    write_tensors(folder, tensors)
    with pytest.raises(ModelLoadError, match=f"{SOME}.* NaN"):
        load(folder, weights="w4a8")


@pytest.mark.parametrize("name", ["auto", "nf4-dq", *FORMATS])
def test_the_size_told_before_is_about_what_is_taken(name, folder):
    config = parse_config(VARIANTS["llama3.2"].raw)
    quant = QuantScheme.parse(name) if "g32" not in name else QuantScheme.parse("w8a16")
    with Checkpoint(folder) as checkpoint:
        told = weight_bytes(config, checkpoint, quant)
    w = load(folder, weights=str(quant)).weights
    kept = {id(x): x for x in w.matrices}.values()
    # The reference backend keeps each 4-bit code in a byte, and rows are padded to 32.
    taken = sum(x.nbytes - (x.parts["codes"].nbytes / 2 if x.format in ("int4", "nf4") else 0) for x in kept)
    assert taken <= told <= 1.4 * taken + 4000


@pytest.mark.parametrize("variant", ["llama3.2", "qwen3"])  # a tied embedding, and a head of its own
@pytest.mark.parametrize(
    ("format", "head"),
    [
        ("w4a8", "w8a8"), ("w4a16-g32", "w8a16"), ("nf4", "w8a16"), ("mxfp4,model.layers.0.*=w8a8", "w8a16"),
        ("w4a8,lm_head=w4a8", "w4a8"), ("w4a8,lm_head=bf16", "bf16"), ("w8a8", "w8a8"), ("auto", "auto"),
    ],
)  # fmt: skip
def test_a_head_has_8_bits_unless_it_is_named(variant, format, head, tmp_path):
    folder = write_checkpoint(tmp_path / "model", VARIANTS[variant])
    scheme = target_scheme(format, folder)
    names = ("model.embed_tokens", "lm_head") if read_config(folder).tied_embeddings else ("lm_head",)
    assert scheme.at(*names).name == head
    assert scheme.at("model.layers.1.mlp.up_proj") == QuantScheme.parse(format).at("model.layers.1.mlp.up_proj")
    (folder / "twin.json").write_text("{}")
    assert target_scheme(format, folder) == QuantScheme.parse(format), "made-up weights have no quality"


def test_a_head_stored_in_4_bits_stays(tmp_path):
    folder = write_checkpoint(tmp_path / "model", VARIANTS["qwen3"])
    quantize(QuantizePlan(str(folder), tmp_path / "low", "w4a16,lm_head=w4a16"))
    assert target_scheme("w4a16", tmp_path / "low").at("lm_head").name == "w4a16"
    assert target_scheme("nf4", tmp_path / "low").at("lm_head").name == "w8a16"


def test_fewer_bits_than_the_file_has_are_told(folder, caplog):
    for format in ("w8a8", "w4a8", "w4a8"):
        target_scheme(format, folder)
    assert [record.message.count("eval --compare") for record in caplog.records] == [1]


def test_an_adapter_beside_the_model_is_told(folder, caplog):
    (folder / "adapter_config.json").write_text("{}")
    loader.load_model(folder, ops.resolve("reference"))
    assert "merge" in caplog.text
