"""Quantized checkpoints are read back bit for bit, also by other tools; a failed write never leaves half of one."""

import errno
import json
import os
import shutil
from dataclasses import replace

import pytest
from fixtures_gguf import QWEN2, bpe_keys, trained, write_gguf
from fixtures_layouts import RAW, write_dense
from fixtures_models import all_logits, load, oracle_logits, prompt, random_tensors, read_tensors
from safetensors.torch import load_file

from sameseed.errors import ModelLoadError, ModelSaveError
from sameseed.models import save as save_module
from sameseed.models.checkpoint import Checkpoint
from sameseed.models.config import parse_config
from sameseed.models.loader import load_tokenizer, open_checkpoint, read_config
from sameseed.models.save import save_quantized
from sameseed.scheme import QuantScheme, get


@pytest.fixture
def source(tmp_path):
    folder = write_dense(tmp_path / "source", random_tensors(parse_config(RAW)))
    (folder / "tokenizer.json").write_text('{"a": 1}')
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "pytorch_model.bin").write_bytes(b"not copied")
    return folder


def schemes_of(text):
    """The scheme of each quantized module: the decoder's linear layers, and modules that rules name."""
    scheme = QuantScheme.parse(text)
    names = [n.removesuffix(".weight") for n, t in random_tensors(parse_config(RAW)).items() if t.ndim == 2]
    found = {m: scheme.at(m) for m in names}
    chosen = {m: s for m, s in found.items() if m.endswith("_proj") or s != replace(scheme, rules=())}
    return {m: s for m, s in chosen.items() if s.weights != "fp32"}


def stream(source, schemes):
    for name, value in read_tensors(source).items():
        scheme = schemes.get(name.removesuffix(".weight"))
        yield name, value if scheme is None else scheme.encode(value)


def write(source, out, text, **options):
    schemes = schemes_of(text)
    return save_quantized(out, source, stream(source, schemes), schemes, **options)


SCHEMES = {
    "w4a16-g128": "compressed-tensors", "w4a16-g32-asym": "compressed-tensors", "w4a8": "compressed-tensors",
    "w8a8": "compressed-tensors", "w8a16-g64": "compressed-tensors", "fp8": "compressed-tensors",
    "fp8-b128": "compressed-tensors", "fp8-a8": "compressed-tensors", "mxfp4": "compressed-tensors",
    "w4a16,*.down_proj=w8a8,*.1.*.q_proj=fp32": "compressed-tensors",
    "w4a16-g32,lm_head=w8a16,model.embed_tokens=w8a16-g32": "compressed-tensors", "nf4": "bitsandbytes",
    "nf4-dq": "bitsandbytes", "w4a8-qoq": "sameseed", "qoq-g32": "sameseed", "w8a8n": "sameseed",
    "w8a8-outliers": "sameseed", "int8n-g32": "sameseed", "fp8_e5m2": "sameseed",
    "nf4,*.down_proj=w4a16-g64-asym": "sameseed", "nf4-dq,*.down_proj=qoq,lm_head=fp8-b128": "sameseed",
}  # fmt: skip


@pytest.mark.parametrize("text", SCHEMES)
def test_what_is_written_is_read_bit_for_bit(text, source, tmp_path):
    """Same schemes and codes, and the logits of the model that was quantized in memory."""
    out = write(source, tmp_path / "out", text)
    raw = json.loads((out / "config.json").read_text())
    assert raw["quantization_config"]["quant_method"] == SCHEMES[text]
    assert (raw.get("dtype") == "bfloat16") == (text == "mxfp4")
    schemes, dense = schemes_of(text), read_tensors(source)
    with Checkpoint(out) as checkpoint:
        checkpoint.check(read_config(out))
        for name, value in dense.items():
            scheme = schemes.get(name.removesuffix(".weight"))
            if scheme is None:
                assert checkpoint.scheme(name) is None and checkpoint.tensor(name).equal(value)
                continue
            found, q, want = checkpoint.scheme(name), checkpoint.stored(name), scheme.encode(value)
            assert found is not None and (found.weights, found.activations) == (scheme.weights, scheme.activations)
            assert (q.format, q.shape, q.activations) == (want.format, want.shape, want.activations), name
            assert get(q.format).decode(q).equal(get(want.format).decode(want)), name
            assert q.parts["codes"].equal(want.parts["codes"]), name
    memory = all_logits(load(source, weights=in_memory(text)), prompt(12))
    assert all_logits(load(out), prompt(12)).equal(memory)


def in_memory(text):
    """The same scheme for quantization at load: LM head and embedding stay as stored, unless a rule names them."""
    base, *rules = text.split(",")
    return ",".join([base, *rules, *(f"{m}=fp32" for m in ("lm_head", "model.embed_tokens"))])


@pytest.mark.parametrize(
    "text", ["w4a16-g64", "w8a16-g64", "fp8", "fp8-b128", "w4a16-g64,*.down_proj=w8a16,*.1.*.q_proj=fp32"]
)
def test_transformers_reads_the_same_model(text, source, tmp_path):
    """transformers reads it through the compressed-tensors package, as a user would load it."""
    pytest.importorskip("compressed_tensors")
    out = write(source, tmp_path / "out", text)
    want = oracle_logits(out, prompt(12))
    got = all_logits(load(out), prompt(12))
    assert (got - want).abs().max() < 2e-2 * want.std()  # transformers rounds decoded weights to the scales' type


def test_a_head_in_the_scheme_of_the_layers_is_named(source, tmp_path):
    schemes = {**schemes_of("w8a16"), "lm_head": QuantScheme.parse("w8a16")}
    out = save_quantized(tmp_path / "out", source, stream(source, schemes), schemes)
    found = json.loads((out / "config.json").read_text())["quantization_config"]
    assert found["config_groups"]["group_0"]["targets"] == ["Linear", "lm_head"] and found["ignore"] == []
    assert load(out).weights.lm_head.format == "int8"


def test_files_and_card(source, tmp_path):
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "rag.jinja").write_text("{{ documents }}")
    for name in ("tokenizer.model", "merges.txt", "LICENSE", "USE_POLICY.md"):
        (source / name).write_text(name)
    source = source.rename(tmp_path / "Llama-3.1-8B")
    out = write(
        source, tmp_path / "new" / "out", "w4a16", card="Calibrated on nothing.", files={"quantization.json": "{}"}
    )
    assert {p.name for p in out.iterdir()} == {
        "config.json", "model.safetensors", "tokenizer.json", "generation_config.json", "chat_template.jinja",
        "README.md", "quantization.json", "additional_chat_templates", "tokenizer.model", "merges.txt", "LICENSE",
        "USE_POLICY.md",
    }  # fmt: skip
    assert (out / "additional_chat_templates" / "rag.jinja").read_text() == "{{ documents }}"
    card = (out / "README.md").read_text()
    words = ("w4a16", "# Llama-3.1-8B, quantized", "Calibrated on nothing.")
    assert all(word in card for word in words) and str(tmp_path) not in card
    assert read_config(out).eos_token_ids == (2, 7)
    assert os.listdir(out.parent) == ["out"]
    assert write(source, out, "w4a16", overwrite=True) == out, "templates and licence are part of a checkpoint"


def test_of_a_model_that_also_sees_the_language_model_is_written(source, tmp_path):
    want = all_logits(load(write(source, tmp_path / "plain", "w4a16")), prompt(9))
    text = {**RAW, "model_type": "ministral3"}
    raw = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "eos_token_id": 5}
    (source / "config.json").write_text(json.dumps({**raw, "text_config": text, "vision_config": {}}))
    out = write(source, tmp_path / "out", "w4a16")
    found = json.loads((out / "config.json").read_text())
    assert (found["architectures"], found["model_type"]) == (["Ministral3ForCausalLM"], "ministral3")
    assert found["eos_token_id"] == 5 and not {"text_config", "vision_config"} & found.keys()
    assert all_logits(load(out), prompt(9)).equal(want)


def test_shards_and_their_index(source, tmp_path):
    out = write(source, tmp_path / "out", "w4a16", shard_bytes=20_000)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(p.name for p in out.glob("*.safetensors"))
    assert len(files) > 3 and set(index["weight_map"].values()) == set(files)
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    sizes = {f: sum(t.nbytes for t in load_file(out / f).values()) for f in files}
    assert sum(sizes.values()) == index["metadata"]["total_size"]
    assert all(size <= 20_000 or len(load_file(out / f)) == 1 for f, size in sizes.items())
    whole = write(source, tmp_path / "whole", "w4a16")
    assert all_logits(load(out), prompt(9)).equal(all_logits(load(whole), prompt(9)))


def names(folder):
    return sorted(os.listdir(folder))


def test_an_existing_destination_is_refused_unless_it_is_empty(source, tmp_path):
    (tmp_path / "out").mkdir()
    out = write(source, tmp_path / "out", "w4a16")
    before = (out / "config.json").read_bytes()
    with pytest.raises(ModelSaveError, match=r"exists already.*--overwrite"):
        write(source, out, "w8a16")
    assert (out / "config.json").read_bytes() == before
    write(source, out, "w8a16", overwrite=True)
    assert str(next(iter(load(out).weights.layers)).o.format) == "int8"
    assert names(tmp_path) == ["out", "source"]


@pytest.mark.parametrize(
    ("kind", "word"), [("file", "no checkpoint"), ("folder", "no checkpoint"), ("link", "link"), ("other", "thesis")]
)
def test_what_is_no_checkpoint_is_never_overwritten(kind, word, source, tmp_path):
    out = tmp_path / "out"
    if kind == "file":
        out.write_text("mine")
    elif kind == "link":
        out.symlink_to(source)
    else:
        out.mkdir()
        (out / "thesis.tex").write_text("mine")
        (out / ("config.json" if kind == "other" else "notes")).write_text("{}")
    with pytest.raises(ModelSaveError, match=word):
        write(source, out, "w4a16", overwrite=True)
    assert names(tmp_path) == ["out", "source"] and (out.is_symlink() or kind != "link")


def test_the_model_itself_is_never_overwritten(source, tmp_path):
    before = names(source)
    inside = write(source, tmp_path / "out", "w4a16")
    shutil.copytree(source, inside / "original")
    for from_, out in ((source, source), (inside / "original", inside)):
        with pytest.raises(ModelSaveError, match="holds the model itself"):
            write(from_, out, "w4a16", overwrite=True)
    assert names(source) == before and names(inside / "original") == before


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("number", range(0, 40, 9))
def test_a_disk_that_is_full_leaves_nothing_or_the_old(number, overwrite, source, tmp_path, monkeypatch):
    """The disk is full after `number` writes; with `overwrite`, the old checkpoint stays as it was."""
    out = tmp_path / "out"
    if overwrite:
        write(source, out, "w8a16")
    before = {p.name: p.read_bytes() for p in out.iterdir()} if overwrite else {}
    real, count = os.fsync, 0

    def full(descriptor):
        nonlocal count
        count += 1
        if count > number:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(save_module.os, "fsync", full)
    try:
        write(source, out, "w4a16", overwrite=overwrite, shard_bytes=50_000)
    except ModelSaveError as error:
        assert "No space left on device" in str(error) and str(out) in str(error)
    else:
        assert count <= number
        return
    assert names(tmp_path) == (["out", "source"] if overwrite else ["source"]) or count > 1
    if out.exists() and overwrite and count <= number + 1:
        found = {p.name: p.read_bytes() for p in out.iterdir()}
        assert found == before or load(out)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ModelLoadError("x"), RuntimeError("x")])
def test_an_interruption_leaves_nothing(error, source, tmp_path):
    def broken():
        yield from list(stream(source, schemes_of("w4a16")))[:9]
        raise error

    with pytest.raises(type(error)):
        save_quantized(tmp_path / "out", source, broken(), schemes_of("w4a16"), shard_bytes=1)
    assert names(tmp_path) == ["source"]


def test_a_gguf_file_becomes_a_folder(tmp_path):
    """The folder has the file's config, tokenizer and codes."""
    keys = bpe_keys(trained(QWEN2), "qwen2", {"<e>": 3}, eos_token_id=2, suppress_tokens=[5, 9])
    tensors = random_tensors(parse_config(RAW))
    kinds = {True: "Q4_0", False: "F16"}
    path = write_gguf(tmp_path / "m.gguf", RAW, tensors, lambda n: kinds["ffn" in n or "attn" in n], tokenizer=keys)
    with open_checkpoint(path) as checkpoint:
        checkpoint.check(read_config(path))
        found = {n: checkpoint.scheme(n) for n in tensors if tensors[n].ndim == 2}
        schemes = {n.removesuffix(".weight"): s for n, s in found.items() if s is not None}
        values = [(n, checkpoint.stored(n) if found.get(n) else checkpoint.tensor(n)) for n in tensors]
    out = save_quantized(tmp_path / "out", path, values, schemes)
    assert all_logits(load(out), prompt(9)).equal(all_logits(load(path), prompt(9)))
    assert load_tokenizer(out).encode("Hello there") == load_tokenizer(path).encode("Hello there")
    assert read_config(out).suppress_tokens == read_config(path).suppress_tokens == (5, 9)
    assert "suppress_tokens" not in json.loads((out / "config.json").read_text())
