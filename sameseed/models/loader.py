"""Load and check a model: a Hugging Face folder (config.json, safetensors, sharded or not) or a GGUF file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

from sameseed import hub, registry
from sameseed.errors import ModelLoadError, VocabularyError, nearest, say_once
from sameseed.formats import _losses
from sameseed.models.checkpoint import Checkpoint, head_apart
from sameseed.models.config import ASSETS, EMBEDDED, GGUF, MTP_BESIDE, ModelConfig, family, parse_config, read_json
from sameseed.models.decoder import Decoder
from sameseed.models.gguf import config as gguf
from sameseed.models.gguf.header import MAGIC, GGUFFile
from sameseed.models.gguf.source import GGUFCheckpoint
from sameseed.models.gguf.tokenizer import read_gguf_tokenizer
from sameseed.models.weights import Progress, TensorSource, read_weights, rounds
from sameseed.ops import Ops
from sameseed.scheme import QuantScheme, get
from sameseed.special import GENERATION, end_tokens, read_object, special_tokens
from sameseed.tokenizer import Tokenizer

HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "merges.txt", "*.model", "LICENSE*", "NOTICE", "USE_POLICY.md"]
# Other layouts of the same weights would be downloaded twice. Of the folders, only that of templates begins so.
HUB_IGNORED = ["[!a]*/*", "a[!d]*/*", "ad[!d]*/*", "consolidated*"]


def resolve_model(name: str) -> Path:
    """Folder or GGUF file of a model: one of EMBEDDED, `smollm2`, a local path, or a hub id (which is downloaded).

    A folder with one GGUF file and no *.safetensors resolves to that file. `org/name/file.gguf` is a file on the hub,
    `org/name:Q4_K_M` the one of that repository with this in its name. The result is a folder, or a GGUF file whatever
    its name. Raises ModelLoadError where there is no such model.
    """
    if name in EMBEDDED:
        return ASSETS / EMBEDDED[name]
    if name in hub.PACKAGED:
        return hub.packaged(name)
    path = Path(os.path.expanduser(name))  # unlike Path.expanduser, it leaves an unknown user as it is
    if name and path.is_dir():  # "" would be the working directory
        return _in_folder(path)
    if name and path.exists():
        if path.suffix.lower() == GGUF:
            return path  # its reader says what is wrong with it
        with path.open("rb") as file:
            if file.read(len(MAGIC)) == MAGIC:
                return path
        raise ModelLoadError(f"{name} is no GGUF file; give one, or the folder of config.json and *.safetensors")
    repository, colon, label = name.partition(":")
    one_file = name.count("/") == 2 and name.lower().endswith(GGUF)
    if not (one_file or repository.count("/") == 1) or name.startswith((".", "/", "~")):
        near = nearest(name, (*EMBEDDED, *hub.PACKAGED, *registry.names("drafters")))
        raise ModelLoadError(
            f"no model at {name!r}{near}: give a folder, a GGUF file, a hub id like 'org/name' or 'org/name:Q4_K_M', "
            "'smollm2' or 'embedded'"
        )
    from huggingface_hub import snapshot_download

    try:
        if one_file:
            return hub.fetch(*name.rsplit("/", 1))
        if colon:
            return hub.labelled(repository, label)
        folder = Path(snapshot_download(name, allow_patterns=HUB_FILES, ignore_patterns=HUB_IGNORED))
        if not any(folder.glob("*.safetensors")):
            return hub.labelled(repository)
    except ModelLoadError:
        raise
    except Exception as error:  # besides its own errors, those of the HTTP library that this version is built on
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelLoadError(f"no folder {name!r} here, and the hub did not give it: {first}") from None
    return _in_folder(folder)


def _in_folder(folder: Path) -> Path:
    """The folder itself, or the one GGUF file of a language model in it where there are no *.safetensors."""
    files = sorted(f for f in folder.iterdir() if f.suffix.lower() == GGUF)
    if not files or any(folder.glob("*.safetensors")):
        return folder
    files = [f for f in files if "mmproj" not in f.name.lower() and not f.match(MTP_BESIDE)] or files
    if len(files) > 1:
        raise ModelLoadError(f"{folder} holds {len(files)} GGUF files; name one of them, e.g. {files[0]}")
    return files[0]


def open_checkpoint(path: Path) -> Checkpoint | GGUFCheckpoint:
    """The tensors of a folder or GGUF file from `resolve_model`: a context, and a `TensorSource` once checked."""
    return GGUFCheckpoint(path) if path.is_file() else Checkpoint(path)


@contextmanager
def open_model(path: Path) -> Iterator[tuple[ModelConfig, TensorSource]]:
    """The config and the checked tensors of a folder or GGUF file. Raises ModelLoadError."""
    config = read_config(path)
    with open_checkpoint(path) as source:
        source.check(config)
        yield config, source


def target_scheme(format: str, path: Path) -> QuantScheme:
    """The scheme that `format` means for a target in a folder or GGUF file: with a head of 8 bits or more.

    Only rules name fewer bits for the head; a head that is stored in the format keeps its codes. Twins, whose weights
    are made up, and drafts, whose quality decides speed alone, are stored as `format` says (`QuantScheme.parse`).
    """
    quant = QuantScheme.parse(format)
    if quant.weights == "auto" or get(quant.weights).bits >= 8 or (path / "twin.json").exists():
        return quant
    with open_model(path) as (config, source):
        if rounds(config, source, quant) and not path.is_relative_to(ASSETS):
            say_once(
                f"{quant.name} rounds to fewer bits than the file has: {_losses.likely(quant)}; "
                f"`sameseed eval --compare MODEL MODEL@{format}` measures it, w8a8 and `sameseed quantize` lose less"
            )
        own = source.scheme("model.embed_tokens.weight" if config.tied_embeddings else "lm_head.weight")
    return quant if own is not None and own.weights == quant.weights else quant.with_head()


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a folder or a GGUF file. Raises ModelLoadError."""
    return read_gguf_tokenizer(path) if path.is_file() else Tokenizer.from_folder(path)


def check_vocab(target: Path, draft: Path) -> None:
    """Raise VocabularyError unless both models have the same tokens with the same ids (padding is ignored)."""
    if target == draft or (target.is_file() and draft.is_file() and _list_alike(target, draft)):
        return
    of_target, of_draft = load_tokenizer(target), load_tokenizer(draft)
    if differing := [token for _, token in of_target.vocabulary().items() ^ of_draft.vocabulary().items()]:
        token = min(differing)
        its, own = ("missing" if (piece := t.token(token)) is None else repr(piece) for t in (of_draft, of_target))
        raise VocabularyError(
            f"the draft model has another vocabulary: its token {token} is {its}, the target's is {own}; use a draft "
            "of the target's own family"
        )


def _list_alike(one: Path, other: Path) -> bool:
    """Do two GGUF files list the same tokens? This is known long before their tokenizers are made."""
    with closing(GGUFFile(one)) as mine, closing(GGUFFile(other)) as its:
        tokens = mine.metadata.get("tokenizer.ggml.tokens")
        return bool(tokens) and tokens == its.metadata.get("tokenizer.ggml.tokens")


def load_model(
    folder: Path,
    ops: Ops,
    quant: QuantScheme | None = None,
    max_model_len: int | None = None,
    device: str = "cpu",
    progress: Progress | None = None,
) -> Decoder:
    """The model in `folder` (or in a GGUF file), its weights stored by `quant` (default: as in the checkpoint).

    Raises ModelLoadError naming the tensor that is missing, extra, of the wrong shape or not finite.
    `progress(done, total)` counts values.
    """
    if (folder / "adapter_config.json").is_file():
        say_once(f"{folder.name}: the adapter beside the model is not applied; merge it into the weights first")
    with open_model(folder) as (config, source):
        weights = read_weights(config, source, quant or QuantScheme(), ops, device, progress)
    return family(config.architecture)(config, weights, ops, max_model_len)


def named_tokens(folder: Path) -> tuple[dict[int, list[str]], dict[int, list[str]]]:
    """The end tokens of a folder or GGUF file, and its special tokens with a role: by id, with what names them."""
    if not folder.is_file():
        return end_tokens(folder, read_json(folder / "config.json")), special_tokens(folder)
    with closing(GGUFFile(folder)) as file:
        return gguf.end_tokens(file), gguf.special_tokens(file)


def read_config(folder: Path) -> ModelConfig:
    """`config.json` with the end and suppressed tokens that the folder's files name, or a GGUF file's keys.

    A stored LM head that is no copy of the embedding is read, although config.json may tie both. Raises ModelLoadError.
    """
    if folder.is_file():
        with closing(GGUFFile(folder)) as file:
            return parse_config(gguf.raw_config(file), where=str(folder))
    raw = read_json(folder / "config.json")
    raw["eos_token_id"] = list(end_tokens(folder, raw))
    if suppressed := read_object(folder / GENERATION).get("suppress_tokens"):
        raw["suppress_tokens"] = suppressed
    config = parse_config(raw, where=str(folder / "config.json"))
    times = tuple(f.stat().st_mtime_ns for f in sorted(folder.glob("*.safetensors")) if f.is_file())
    if not config.tied_embeddings or not head_apart(folder, times):
        return config
    say_once(f'{folder}: its lm_head.weight is no copy of the embedding, and is read; "tie_word_embeddings" says true')
    return replace(config, tied_embeddings=False)
