"""A trained head as a checkpoint: the plain EAGLE-3 layout (`LlamaForCausalLMEagle3`), which vLLM reads too."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from sameseed.models.config import ModelConfig, RopeConfig
from sameseed.train.head_model import HeadForTraining, HeadShape


def head_config(shape: HeadShape, aux_layers: tuple[int, ...], dtype: str) -> dict[str, Any]:
    """config.json of a head that reads what enters the target's layers `aux_layers`."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "attention_bias": False,
        "draft_vocab_size": shape.draft_vocab_size,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(aux_layers), "use_aux_hidden_state": True},
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "max_position_embeddings": shape.max_positions,
        "mlp_bias": False,
        "norm_before_residual": False,
        "num_attention_heads": shape.num_heads,
        "num_hidden_layers": 1,
        "num_key_value_heads": shape.num_kv_heads,
        "rms_norm_eps": shape.rms_eps,
        "rope_scaling": rope_scaling(shape.rope),
        "rope_theta": shape.rope.theta,
        "target_hidden_size": shape.target_hidden,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "vocab_size": shape.vocab_size,
    }


def rope_scaling(rope: RopeConfig) -> dict[str, Any] | None:
    """`rope_scaling` of a config.json; None for the plain kind, and where only the target's own file could say it."""
    if rope.kind == "linear":
        return {"rope_type": "linear", "factor": rope.factor}
    if rope.kind == "llama3":
        return {
            "rope_type": "llama3",
            "factor": rope.factor,
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "original_max_position_embeddings": rope.original_max_len,
        }
    return None


def head_rope(target: ModelConfig) -> RopeConfig:
    """The target's rotary embedding where a head's config.json can say it, else one with its base alone."""
    return target.rope if target.rope.kind in ("linear", "llama3") else RopeConfig(theta=target.rope.theta)


def export_head(
    head: HeadForTraining, aux_layers: tuple[int, ...], target_ids: Tensor | None, folder: Path, dtype: str = "bfloat16"
) -> None:
    """Write config.json and model.safetensors; `target_ids` [Vd]: the target's token of each of the head's own.

    d2t int64 [Vd] holds offsets (id = i + d2t[i]); t2d bool [V] marks the tokens that the head has. An embedding is not
    written: it is the target's, and so is the LM head where the vocabulary is whole.
    """
    folder.mkdir(parents=True, exist_ok=True)
    wanted: torch.dtype = getattr(torch, dtype)
    tensors = {n: p.detach().to("cpu", wanted).contiguous() for n, p in head.named_parameters()}
    if target_ids is not None:
        ids = target_ids.long().cpu()
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(head.shape.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
    partial = folder / "model.partial"
    save_file(tensors, str(partial), metadata={"format": "pt"})
    partial.chmod(0o644)  # written as private, but made to be shared
    os.replace(partial, folder / "model.safetensors")
    config = head_config(head.shape, aux_layers, dtype)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
