"""Checkpoints that cannot be read are refused with the tensor, the file and the remedy; nothing of them is ever run."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fixtures_models import (
    VARIANTS,
    all_logits,
    load,
    prompt,
    random_tensors,
    read_tensors,
    write_checkpoint,
    write_config,
    write_shards,
)
from safetensors.torch import save_file

from foretoken.errors import ForetokenError, ModelLoadError
from foretoken.models import loader
from foretoken.models.checkpoint import Checkpoint, SafetensorsFile
from foretoken.models.config import parse_config
from foretoken.models.loader import resolve_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sound checkpoint, for the test to damage."""
    return write_checkpoint(tmp_path / "model", VARIANTS["llama3.2"])


def weights(folder: Path) -> Path:
    return folder / "model.safetensors"


def rewrite(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file({n: t.contiguous() for n, t in tensors.items()}, weights(folder), {"format": "pt"})


def refused(folder: Path, *words: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        load(folder)
    assert isinstance(caught.value, ForetokenError) and isinstance(caught.value, ValueError)
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in: {caught.value}"


# --- tensors ---

SOME = "model.layers.1.mlp.up_proj.weight"


def test_missing_tensor(folder):
    tensors = read_tensors(folder)
    del tensors[SOME]
    rewrite(folder, tensors)
    refused(folder, str(folder), SOME, "missing", "1 in all", "config.json")


def test_a_head_that_config_does_not_tie_is_missing(folder):
    raw = json.loads((folder / "config.json").read_text())
    write_config(folder, {**raw, "tie_word_embeddings": False})
    refused(folder, "lm_head.weight", "missing")


def test_extra_tensor(folder):
    rewrite(folder, read_tensors(folder) | {"model.layers.1.mlp.up_proj.bias": torch.zeros(72)})
    refused(folder, str(folder), "unexpected", "model.layers.1.mlp.up_proj.bias", "LlamaForCausalLM")


def test_tensors_of_more_layers_than_config_says(folder):
    raw = json.loads((folder / "config.json").read_text())
    write_config(folder, {**raw, "num_hidden_layers": 2})
    refused(folder, "unexpected", "model.layers.2.")


@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"])
def test_tensors_that_can_be_computed_are_ignored(name, folder):
    """A stored copy of a tied head, and what old checkpoints kept of the rotation."""
    before = all_logits(load(folder), prompt(5))
    tensors = read_tensors(folder)
    extra = tensors["model.embed_tokens.weight"].clone() if name == "lm_head.weight" else torch.ones(8)
    rewrite(folder, tensors | {name: extra})
    assert all_logits(load(folder), prompt(5)).equal(before)


@pytest.mark.parametrize("shape", [(72, 47), (73, 48), (48, 72), (72 * 48,), (1, 72, 48)], ids=str)
def test_wrong_shape(shape, folder):
    rewrite(folder, read_tensors(folder) | {SOME: torch.zeros(shape)})
    refused(folder, str(folder), SOME, str(list(shape)), "[72, 48]")


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.int8, torch.bool, torch.float8_e4m3fn], ids=str)
def test_wrong_type(dtype, folder):
    rewrite(folder, read_tensors(folder) | {SOME: torch.ones(72, 48).to(dtype)})
    refused(folder, SOME, "F32, BF16 and F16")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", [SOME, "model.norm.weight", "model.embed_tokens.weight"])
def test_weights_that_are_no_numbers(name, value, dtype, folder):
    tensors = read_tensors(folder)
    tensors[name] = tensors[name].to(dtype)
    tensors[name].view(-1)[17] = value
    rewrite(folder, tensors)
    refused(folder, name, "model.safetensors", "NaN or infinity")


def test_infinities_that_cancel(folder):
    """Their sum is NaN, not infinite: found all the same."""
    tensors = read_tensors(folder)
    tensors[SOME].view(-1)[:2] = torch.tensor([float("inf"), float("-inf")])
    rewrite(folder, tensors)
    refused(folder, SOME, "NaN or infinity")


def test_large_weights_are_no_infinity(folder):
    """A sum beyond the type's range is no fault: each weight is finite."""
    tensors = {n: t.half() for n, t in read_tensors(folder).items()}
    tensors[SOME] = torch.full((72, 48), 60000.0, dtype=torch.float16)
    rewrite(folder, tensors)
    assert load(folder).weights.layers[1].gate_up.parts["weight"].max() == 60000


# --- files ---


@pytest.mark.parametrize("keep", [0, 4, 8, 100, 3000, -1])
def test_truncated_file(keep, folder):
    data = weights(folder).read_bytes()
    weights(folder).write_bytes(data[:keep])
    refused(folder, str(weights(folder)), "not a sound safetensors file", "download it again")


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x04\x95 a pickle",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0000\nsize 12\n",
        b"<html>404</html>" * 10,
        struct.pack("<Q", 2**60) + b"{}",
        struct.pack("<Q", 2) + b"{}" + b"rest",
        struct.pack("<Q", 6) + b"[1, 2]",
        struct.pack("<Q", 70) + b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,999999]}}'.ljust(70),
    ],
    ids=["pickle", "lfs", "html", "huge header", "unclaimed bytes", "no object", "offsets beyond the end"],
)
def test_files_that_are_no_safetensors(data, folder):
    weights(folder).write_bytes(data)
    refused(folder, str(weights(folder)), "download it again")


def test_a_flipped_header_byte_is_never_silent(folder):
    """Either the file is unsound, or a name, a shape or a type is wrong."""
    data = bytearray(weights(folder).read_bytes())
    header = struct.unpack("<Q", data[:8])[0]
    for place in range(8, 8 + header, 197):
        damaged = data.copy()
        damaged[place] ^= 0x01
        weights(folder).write_bytes(bytes(damaged))
        try:
            load(folder)
        except ModelLoadError:
            continue
        # What may change without harm: the metadata, which nobody reads, and the space that pads the header.
        end = data.index(b"}") + 1
        assert place < end or place >= 8 + header - 8, f"byte {place} ({chr(data[place])!r})"


@pytest.mark.parametrize("other", ["pytorch_model.bin", "consolidated.00.pth", "model.pt", "model.ckpt"])
def test_pickles_are_never_opened(other, folder):
    """The file would leave a trace if it were."""
    trace = folder / "trace"
    weights(folder).unlink()
    (folder / other).write_bytes(f"cposix\nsystem\n(S'touch {trace}'\ntR.".encode())
    refused(folder, str(folder), other, "pickle", "safetensors")
    assert not trace.exists()


def test_no_weights_at_all(folder):
    weights(folder).unlink()
    refused(folder, str(folder), "no *.safetensors")


def test_code_of_a_checkpoint_is_never_run(folder):
    trace = folder / "trace"
    code = f"open({str(trace)!r}, 'w').close()\nclass Evil:\n    pass\n"
    for name in ("modeling_evil.py", "configuration_evil.py", "__init__.py", "tokenization_evil.py"):
        (folder / name).write_text(code)
    raw = json.loads((folder / "config.json").read_text())
    auto = {"AutoConfig": "configuration_evil.Evil", "AutoModelForCausalLM": "modeling_evil.Evil"}
    write_config(
        folder, {**raw, "auto_map": auto, "trust_remote_code": True, "custom_pipelines": {"x": {"impl": "e.E"}}}
    )
    assert all_logits(load(folder), prompt(5)).shape == (5, 97)  # it is an ordinary Llama, and is run as one
    write_config(folder, {**raw, "auto_map": auto, "architectures": ["EvilForCausalLM"]})
    refused(folder, "EvilForCausalLM", "not supported")
    assert not trace.exists()


# --- shards ---


@pytest.fixture
def sharded(folder: Path) -> Path:
    write_shards(folder, read_tensors(folder))
    weights(folder).unlink()
    load(folder)  # sound so far
    return folder


def index(folder: Path) -> Path:
    return folder / "model.safetensors.index.json"


def test_missing_shard(sharded):
    (sharded / "model-00002-of-00003.safetensors").unlink()
    refused(sharded, "model-00002-of-00003.safetensors", "missing", "index", "download it again")


def test_damaged_shard(sharded):
    shard = sharded / "model-00002-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-10])
    refused(sharded, str(shard), "not a sound safetensors file")


def test_shard_without_its_tensors(sharded):
    save_file({"model.norm.weight": torch.ones(48)}, sharded / "model-00001-of-00003.safetensors")
    refused(sharded, "tensor", "missing")


def test_the_index_decides_which_files_are_read(sharded):
    """Mistral's repositories keep the same weights a second time, under other names."""
    save_file({"layers.0.attention.wq.weight": torch.ones(3)}, sharded / "consolidated.safetensors")
    load(sharded)


def test_model_safetensors_goes_before_other_files(folder):
    save_file({"layers.0.attention.wq.weight": torch.ones(3)}, folder / "consolidated.safetensors")
    load(folder)


@pytest.mark.parametrize(
    "file", ["../outside.safetensors", "/etc/passwd", "sub/model.safetensors", "..", "", ".", "a\x00b", "~/x"], ids=repr
)
def test_index_outside_its_folder(file, sharded):
    save_file(random_tensors(parse_config(VARIANTS["llama3.2"].raw)), sharded.parent / "outside.safetensors")
    content = json.loads(index(sharded).read_text())
    content["weight_map"][SOME] = file
    index(sharded).write_text(json.dumps(content))
    refused(sharded, str(sharded))


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", "null", '{"weight_map": []}', '{"weight_map": 3}', '{"weight_map": {"a": 1, "b": "c"}}',
     '{"weight_map": {"a": ["b"]}}', '{"weight_map": {"a": null}}', "[" * 100_000],
    ids=lambda t: t[:40],
)  # fmt: skip
def test_index_that_is_none(text, sharded):
    index(sharded).write_text(text)
    refused(sharded, str(index(sharded)))


def test_an_index_of_nothing(sharded):
    index(sharded).write_text('{"weight_map": {}}')
    refused(sharded, str(sharded), "missing")


# --- where a model is ---


def test_embedded_names_are_folders_of_the_package():
    package = Path(loader.__file__).parents[1]
    assert resolve_model("embedded") == package / "assets" / "target"
    assert resolve_model("embedded-draft") == package / "assets" / "draft"


def test_a_folder_is_itself(folder, monkeypatch):
    assert resolve_model(str(folder)) == folder
    monkeypatch.chdir(folder.parent)
    assert resolve_model("model") == Path("model")
    monkeypatch.setenv("HOME", str(folder.parent))
    assert resolve_model("~/model") == folder


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


def test_a_file_in_the_place_of_a_folder(folder):
    with pytest.raises(ModelLoadError, match="is a file; give the folder"):
        resolve_model(str(weights(folder)))


def test_an_empty_folder(tmp_path):
    refused(tmp_path, "config.json", "missing", "safetensors", "tokenizer.json")


def test_hub_id_downloads_no_code_and_no_pickle(folder, monkeypatch):
    from huggingface_hub.utils import filter_repo_objects

    asked: dict[str, Any] = {}

    def download(name: str, **options: object) -> str:
        asked.update(options, name=name)
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert resolve_model("org/name") == folder
    assert asked["name"] == "org/name"
    allowed, ignored = asked["allow_patterns"], asked["ignore_patterns"]
    for name, wanted in {
        "config.json": True,
        "tokenizer.json": True,
        "model-00001-of-00002.safetensors": True,
        "chat_template.jinja": True,
        "modeling_evil.py": False,
        "pytorch_model.bin": False,
        "model.pth": False,
        "consolidated.safetensors": False,
        "original/model.safetensors": False,
    }.items():
        assert len(list(filter_repo_objects([name], allow_patterns=allowed, ignore_patterns=ignored))) == wanted, name


class ConnectError(Exception):
    """Stands for the errors of the HTTP library below the hub's, which differs by version."""


def hub_errors() -> list[Exception]:
    from huggingface_hub import errors

    answer: Any = SimpleNamespace(headers={}, request=None)
    return [
        errors.LocalEntryNotFoundError("An error happened and the files are not in the cache.\nMore lines"),
        errors.RepositoryNotFoundError("404: Repository Not Found", response=answer),
        errors.GatedRepoError("403: gated", response=answer),
        errors.HfHubHTTPError("500: oh dear", response=answer),
        errors.HFValidationError("Repo id must use alphanumeric chars"),
        errors.OfflineModeIsEnabled("Cannot reach https://huggingface.co: offline mode is enabled."),
        ConnectError("Temporary failure in name resolution"),
        ConnectionError("refused"),
        TimeoutError("The read operation timed out"),
        OSError(28, "No space left on device"),
    ]


@pytest.mark.parametrize("number", range(10))
def test_a_hub_that_does_not_answer(number, monkeypatch):
    error = hub_errors()[number]

    def download(name: str, **_: object) -> str:
        raise error

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(ModelLoadError) as caught:
        resolve_model("org/name")
    text = str(caught.value)
    assert "'org/name'" in text and str(error).splitlines()[0] in text and "\n" not in text
    assert "folder" in text


def test_progress_counts_every_value(folder):
    seen: list[tuple[int, int]] = []
    from foretoken import ops

    loader.load_model(folder, ops.resolve("reference"), progress=lambda done, total: seen.append((done, total)))
    total = sum(t.numel() for t in read_tensors(folder).values())
    assert {t for _, t in seen} == {total} and seen[-1] == (total, total)
    assert [d for d, _ in seen] == sorted({d for d, _ in seen})


def test_checkpoint_closes_its_files(sharded, monkeypatch):
    """After use, and after an error: the shards opened before the missing one are closed."""
    closed = []
    real = SafetensorsFile.close
    monkeypatch.setattr(SafetensorsFile, "close", lambda self: (closed.append(self.path.name), real(self)))
    with Checkpoint(sharded):
        assert not closed
    assert len(closed) == 3
    (sharded / "model-00003-of-00003.safetensors").unlink()
    with pytest.raises(ModelLoadError), Checkpoint(sharded):
        pass
    assert len(closed) == 5
