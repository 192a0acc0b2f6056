"""Random-weight checkpoints at true shapes, in every peer's format, all from the same bfloat16 weights.

    python benchmarks/peers/checkpoints.py --shape llama-3.2-1b --home ENVIRONMENTS --work FOLDER

Times do not depend on the values, but the same ones everywhere let run.py see that all engines compute the same. What
is there already is kept: a folder or file under its final name is complete.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from shapes import SHAPES, Shape
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

HERE = Path(__file__).resolve().parent
SHARD = 2 << 30  # bytes of one safetensors file
GGUF = {"gguf-bf16": "bf16", "gguf-q4_0": "q4_0", "gguf-q4_k_m": "q4_k_m", "gguf-q8_0": "q8_0"}
OPENVINO = {
    "openvino-int4": ["--weight-format", "int4", "--sym", "--group-size", "128", "--ratio", "1.0"],
    "openvino-int8": ["--weight-format", "int8"],
}
KINDS = ("hf-bf16", "hf-w8a8", *GGUF, *OPENVINO)


def path_of(work: Path, shape: str, kind: str) -> Path:
    """Where a checkpoint lies: a folder, or one file for GGUF."""
    return work / shape / (kind + ".gguf" if kind in GGUF else kind)


def write_tokenizer(folder: Path, vocab: int) -> None:
    """A byte-level tokenizer of `vocab` entries: 3 special ones, the bytes, and names without text."""
    pieces = ["<s>", "</s>", "<unk>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    pieces += [f"<{i}>" for i in range(len(pieces), vocab)]
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces[:vocab])}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(pieces[:3])
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    about |= {"model_max_length": 8192, "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))


def write_folder(
    folder: Path, shape: Shape, tensors: Iterator[dict[str, torch.Tensor]], extra: dict[str, object]
) -> None:
    """A Hugging Face folder: config, tokenizer, sharded weights; `tensors` come in pieces that belong together."""
    write_tokenizer(folder, shape.vocab)
    (folder / "config.json").write_text(json.dumps({**shape.config(), **extra}, indent=1))
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 0, "eos_token_id": 1}))
    shard: dict[str, torch.Tensor] = {}
    where: dict[str, str] = {}
    size = 0

    def flush() -> None:
        nonlocal size
        if shard:
            name = f"model-{len(set(where.values())) + 1:05d}.safetensors"
            save_file(shard, folder / name, metadata={"format": "pt"})
            where.update(dict.fromkeys(shard, name))
            shard.clear()
            size = 0

    for piece in tensors:
        shard.update(piece)
        size += sum(t.numel() * t.element_size() for t in piece.values())
        if size > SHARD:
            flush()
    flush()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))


def random_tensors(shape: Shape) -> Iterator[dict[str, torch.Tensor]]:
    """Normal weights of standard deviation 0.02 in bfloat16, norms of 1; the same for the same shape."""
    generator = torch.Generator().manual_seed(0)
    for name, size in shape.tensors():
        if len(size) == 1:
            yield {name: torch.ones(size, dtype=torch.bfloat16)}
        else:
            yield {name: (torch.randn(size, generator=generator) * 0.02).to(torch.bfloat16)}


def read_tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors of a folder, in the order of its index."""
    index: dict[str, str] = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    for file in sorted(set(index.values())):
        with safe_open(folder / file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - no mapping, though it has keys()
                yield name, opened.get_tensor(name)


def w8a8_tensors(source: Path) -> Iterator[dict[str, torch.Tensor]]:
    """compressed-tensors: linear layers but the head as int8 codes with a scale a channel, rounded to nearest."""
    for name, weight in read_tensors(source):
        if not name.endswith("_proj.weight"):
            yield {name: weight}
            continue
        values = weight.float()
        scale = (values.abs().amax(dim=1, keepdim=True) / 127).to(torch.bfloat16)
        codes = (values / scale.float()).round().clamp(-127, 127).to(torch.int8)
        yield {name: codes, name + "_scale": scale}


W8A8: dict[str, object] = {
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False},
                "input_activations": {
                    "num_bits": 8,
                    "type": "int",
                    "symmetric": True,
                    "strategy": "token",
                    "dynamic": True,
                },
            }
        },
    }
}


def make(kind: str, shape_name: str, home: Path, work: Path) -> None:
    """Make one checkpoint under a name of its own, then give it its final one. Needs hf-bf16 for all others."""
    final, shape = path_of(work, shape_name, kind), SHAPES[shape_name]
    if final.exists():
        return
    print(f"{shape_name}: making {kind}", flush=True)
    source = path_of(work, shape_name, "hf-bf16")
    unfinished = final.with_name("unfinished-" + final.name)
    if unfinished.is_dir():
        shutil.rmtree(unfinished)
    unfinished.unlink(missing_ok=True)
    if kind in ("hf-bf16", "hf-w8a8"):
        unfinished.mkdir(parents=True)
        tensors = random_tensors(shape) if kind == "hf-bf16" else w8a8_tensors(source)
        write_folder(unfinished, shape, tensors, {} if kind == "hf-bf16" else W8A8)
    elif kind in GGUF:
        origin = source if kind == "gguf-bf16" else path_of(work, shape_name, "gguf-bf16")
        python = home / "llama_cpp" / "bin" / "python"
        subprocess.run([python, HERE / "to_gguf.py", origin, GGUF[kind], unfinished], check=True)
    else:
        export = [home / "openvino" / "bin" / "optimum-cli", "export", "openvino", "--model", source]
        export += ["--task", "text-generation-with-past", *OPENVINO[kind], unfinished]
        subprocess.run(export, check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    unfinished.rename(final)


def main(argv: list[str] | None = None) -> int:
    """Make the checkpoints named (all by default); 1 if one could not be made."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-3.2-1b")
    parser.add_argument("--home", type=Path, required=True, help="folder of the environments (environments.py)")
    parser.add_argument("--work", type=Path, required=True, help="folder of the checkpoints")
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"any of {', '.join(KINDS)}; all by default")
    options = parser.parse_args(argv)
    unknown = sorted(set(options.kinds) - set(KINDS))
    if unknown:
        parser.error(f"no kind {', '.join(unknown)}; there are {', '.join(KINDS)}")
    wanted = [k for k in KINDS if not options.kinds or k in options.kinds]
    sources = {"hf-bf16"} | ({"gguf-bf16"} if set(wanted) & set(GGUF) else set())
    failed = []
    for kind in (k for k in KINDS if k in wanted or k in sources):
        try:
            make(kind, options.shape, options.home.resolve(), options.work.resolve())
        except (subprocess.CalledProcessError, OSError) as error:
            failed.append(kind)
            print(
                f"{kind} could not be made ({error}); is its environment there? `make peers` makes it", file=sys.stderr
            )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
