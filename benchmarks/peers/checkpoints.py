"""Makes checkpoints at true shapes in every peer's format, all from the same bfloat16 weights.

    python benchmarks/peers/checkpoints.py --shape llama-3.2-1b --home ENVIRONMENTS --work FOLDER

Checkpoints for passes have random weights, since times do not depend on the values. All engines get the same weights,
so that run.py can check that they compute the same logits. Checkpoints for texts are the embedded models and their
twins, with drafts and heads. Existing checkpoints are kept: a folder or file under its final name is complete.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from arms import ALL, Arm
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from sameseed.measure import shapes
from sameseed.models.config import parse_config
from sameseed.models.loader import resolve_model
from sameseed.models.synthetic import RandomCheckpoint
from sameseed.models.weights import expected_shapes
from sameseed.quantize._run import QuantizePlan, quantize
from sameseed_lab.twin import find_shape, make_twin
from sameseed_lab.twin.files import stream_weights

HERE = Path(__file__).resolve().parent
TINY = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 2048}
SHAPES = {
    "llama-3.2-1b": shapes.SHAPES["llama-3.2-1b"],
    "llama-3.1-8b": shapes.SHAPES["llama-3.1-8b"],
    # For testing the scripts; its times mean nothing.
    "tiny": {**shapes.SHAPES["llama-3.2-1b"], **TINY, "num_attention_heads": 4, "num_key_value_heads": 2},
}
# Checkpoints for texts: the packaged model, and the shape of its twin (None: the packaged model itself).
TEXT_MODELS: dict[str, tuple[str, str | None]] = {
    "embedded": ("embedded-target", None),
    "embedded-draft": ("embedded-draft", None),
    "embedded-head": ("embedded-head", None),
    "twin-1b": ("embedded-target", "llama-3.2-1b"),
    "twin-1b-draft": ("embedded-draft", "smollm2-135m"),
    "twin-1b-head": ("embedded-head", "llama-3.2-1b"),
}
# No parallel draft is packaged: PEERS_PARALLEL names the folder of one, trained by recipes/embedded-parallel.toml.
PARALLEL_FOLDER = "PEERS_PARALLEL"
if trained := os.environ.get(PARALLEL_FOLDER):
    TEXT_MODELS |= {"embedded-parallel": (trained, None), "twin-1b-parallel": (trained, "smollm2-135m")}
GGUF = {"gguf-bf16": "bf16", "gguf-q4_0": "q4_0", "gguf-q4_k_m": "q4_k_m", "gguf-q8_0": "q8_0"}
OPENVINO = {
    "openvino-int4": ["--weight-format", "int4", "--sym", "--group-size", "128", "--ratio", "1.0"],
    "openvino-int8": ["--weight-format", "int8"],
}
ENDS = {"bos_token_id": 0, "eos_token_id": 1}
KINDS = ("hf-bf16", "hf-w8a8", *GGUF, *OPENVINO)


def path_of(work: Path, shape: str, kind: str) -> Path:
    """The path of a checkpoint: a folder, or a file for GGUF."""
    return work / shape / (kind + ".gguf" if kind in GGUF else kind)


def wanted(shape: str, arms: Iterable[Arm]) -> dict[str, list[str]]:
    """The kinds of checkpoints that arms need, by model, in the order of KINDS."""
    found: dict[str, set[str]] = {}
    for arm in arms:
        found.setdefault(shape, set()).add(arm.checkpoint)
        if arm.draft is not None:
            found.setdefault(f"{shape}-{arm.draft[0]}", set()).add(arm.draft[1])
    return {name: [kind for kind in KINDS if kind in kinds] for name, kinds in found.items()}


def write_tokenizer(folder: Path, vocab: int) -> None:
    """Write a byte-level tokenizer with `vocab` entries: 3 special tokens, the bytes, and placeholder tokens."""
    pieces = ["<s>", "</s>", "<unk>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    pieces += [f"<{i}>" for i in range(len(pieces), vocab)]
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces[:vocab])}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(pieces[:3])
    tokenizer.save(str(folder / "tokenizer.json"))
    about: dict[str, object] = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    about |= {"unk_token": "<unk>", "model_max_length": 8192, "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))


def config_of(shape: str) -> dict[str, object]:
    """The config.json of a shape. All settings but the sizes are the same plain ones, so that every engine reads it."""
    return {
        **SHAPES[shape],
        "model_type": "llama",
        "rope_theta": 500000.0,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "max_position_embeddings": 8192,
        **ENDS,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "attention_bias": False,
        "mlp_bias": False,
    }


def write_random(folder: Path, shape: str) -> None:
    """Write a Hugging Face folder with random bfloat16 weights, which are the same each time for a shape."""
    raw = config_of(shape)
    config = parse_config(raw, where=f"shape {shape}")
    folder.mkdir(parents=True)
    write_tokenizer(folder, config.vocab_size)
    (folder / "config.json").write_text(json.dumps(raw, indent=1))
    (folder / "generation_config.json").write_text(json.dumps(ENDS))
    stream_weights(folder, RandomCheckpoint(config), expected_shapes(config))


def write_source(folder: Path, name: str) -> None:
    """Write the bfloat16 checkpoint from which all other checkpoints of a model are made."""
    if name in SHAPES:
        write_random(folder, name)
        return
    of, shape = TEXT_MODELS[name]
    if shape is None:
        shutil.copytree(resolve_model(of), folder)
    elif of == "embedded-head":
        make_twin(find_shape(shape), of, folder, name=shape)
    else:
        target = find_shape(str(TEXT_MODELS[name.removesuffix("-draft").removesuffix("-parallel")][1]))
        config = replace(find_shape(shape), vocab_size=target.vocab_size)  # engines require the target's vocabulary
        make_twin(config, of, folder, name=shape)


def make(kind: str, shape_name: str, home: Path, work: Path) -> None:
    """Make one checkpoint under a temporary name, then rename it. All kinds but hf-bf16 need hf-bf16."""
    final = path_of(work, shape_name, kind)
    if final.exists():
        return
    print(f"{shape_name}: making {kind}", flush=True)
    source = path_of(work, shape_name, "hf-bf16")
    unfinished = final.with_name("unfinished-" + final.name)
    if unfinished.is_dir():
        shutil.rmtree(unfinished)
    unfinished.unlink(missing_ok=True)
    if kind == "hf-bf16":
        write_source(unfinished, shape_name)
    elif kind == "hf-w8a8":  # compressed-tensors: int8 per channel, activations per token, round to nearest
        quantize(QuantizePlan(str(source), unfinished, "w8a8"))
    elif kind in GGUF:
        origin = source if kind == "gguf-bf16" else path_of(work, shape_name, "gguf-bf16")
        python = home / "llama_cpp" / "bin" / "python"
        subprocess.run([python, HERE / "to_gguf.py", origin, GGUF[kind], unfinished], check=True)
    else:
        export: list[str | Path] = [home / "openvino" / "bin" / "optimum-cli", "export", "openvino", "--model", source]
        export += ["--task", "text-generation-with-past", *OPENVINO[kind], unfinished]
        subprocess.run(export, check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    unfinished.rename(final)


def main(argv: list[str] | None = None) -> int:
    """Make the named checkpoints (by default all that run.py needs). Returns 1 if one could not be made."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = sorted({*SHAPES, *TEXT_MODELS})
    parser.add_argument("--shape", choices=names, default="llama-3.2-1b")
    parser.add_argument("--home", type=Path, required=True, help="folder of the environments (environments.py)")
    parser.add_argument("--work", type=Path, required=True, help="folder of the checkpoints")
    parser.add_argument(
        "kinds", nargs="*", metavar="KIND", help=f"any of {', '.join(KINDS)}; by default what run.py needs of the shape"
    )
    options = parser.parse_args(argv)
    unknown = sorted(set(options.kinds) - set(KINDS))
    if unknown:
        parser.error(f"no kind {', '.join(unknown)}; there are {', '.join(KINDS)}")
    arms = [arm for group in ALL.get(options.shape, {}).values() for arm in group]
    models = {options.shape: options.kinds or list(KINDS)} if options.kinds or not arms else wanted(options.shape, arms)
    failed = []
    for name, kinds in models.items():
        if name.endswith("-parallel") and name not in TEXT_MODELS:
            print(f"{name}: left out; {PARALLEL_FOLDER} names no parallel draft (see recipes/embedded-parallel.toml)")
            continue
        sources = {"hf-bf16"} | ({"gguf-bf16"} if set(kinds) & set(GGUF) else set())
        for kind in (k for k in KINDS if k in kinds or k in sources):
            try:
                make(kind, name, options.home.resolve(), options.work.resolve())
            except (subprocess.CalledProcessError, OSError) as error:
                failed.append(kind)
                print(
                    f"{name}: {kind} could not be made ({error}); is its environment there? `make peers` makes it",
                    file=sys.stderr,
                )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
