"""HeadConfig and BlockConfig: shape and flags of a draft head, read from its config.json, and its tensors.

Three layouts of block heads (DFlash: Chen et al., 2026; DSpark: DeepSeek-AI, 2026) are read: z-lab's (`dflash_config`),
DeepSpec's (all settings on the same level as those of the layers) and that of speculators.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sameseed.errors import ConfigError, ModelLoadError, VocabularyError, say_once
from sameseed.models.config import (
    ModelConfig,
    architecture_of,
    layer_shapes,
    one_of,
    parse_config,
    read_json,
    whole_number,
)

# Architecture -> kind of head.
HEADS = {
    "EagleLlamaForCausalLM": "eagle",
    **dict.fromkeys(("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Qwen3ForCausalLM"), "eagle3"),
    **dict.fromkeys(("Eagle3Speculator", "Eagle3DraftModel"), "eagle3"),
    **dict.fromkeys(("DFlashDraftModel", "DFlash2DraftModel"), "block"),  # z-lab
    **dict.fromkeys(("Qwen3DSparkModel", "DSparkDraftModel"), "block"),  # DeepSpec
    **dict.fromkeys(("DFlashSpeculator", "DSparkSpeculator"), "block"),
}
BLOCKS = ("dflash", "dspark")  # speculators_model_type of block heads
# model_type of a head's layer. Heads for Phi and Qwen2 have Llama's layers, whatever the type.
LAYERS = {**dict.fromkeys(("llama", "phi3", "qwen2"), "LlamaForCausalLM"), "qwen3": "Qwen3ForCausalLM"}
ROTATED_FOR = "rotated_for"  # key of config.json: the seed of the target's rotation that a head was adapted to
TARGET_SIGNS = "target_signs"  # key of config.json: `eagle_loader.embedding_signs` of the target
DFLASH2 = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
CODEBOOKS = tuple(f"candidate_selector.{name}_codebook" for name in ("predecessor", "successor"))
SELECTOR = ("candidate_selector.hidden_projection", *CODEBOOKS)  # of DFlash2
TRAINED = "use a head that was trained for this target"
OPTIONAL = ("embed_tokens.weight", "lm_head.weight", "fc.bias", "d2t")  # if missing: the target's (2), none, no offsets


@dataclass(frozen=True)
class HeadConfig:
    """Shape and flags of a draft head.

    `kind`: "eagle" (EAGLE-1 and 2), "eagle3" or "block". `layer`: config of a model with only the head's decoder layer
    (a block head has several layers); it also gives hidden size, vocabulary and context. `aux_layers`: the target's
    layers whose inputs the head reads (the number n of layers means the last layer's output); None: the published
    choice. `norm_before_residual`: the residual connection takes the normed feature. `norm_before_fc`: one norm over
    all captured states; `fc_norm`: one norm per captured state (EAGLE-3.1), after that of `norm_before_fc` if both are
    set. `norm_output`: the head's own feature is its normed output (EAGLE-3.1).
    """

    kind: str
    layer: ModelConfig
    draft_vocab_size: int
    target_hidden_size: int
    aux_layers: tuple[int, ...] | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    def captures(self, num_layers: int) -> tuple[int, ...]:
        """Layers of a target with `num_layers` whose outputs the head reads. Raises ConfigError for missing ones."""
        if self.kind == "eagle":
            return (num_layers - 1,)
        inputs = self.aux_layers or (2, num_layers // 2, num_layers - 3)
        if any(not 1 <= i <= num_layers for i in inputs):
            what = f"what enters layers {list(inputs)} of the target's {num_layers}"
            raise ConfigError(f"the head reads {what}; {TRAINED}")
        return tuple(i - 1 for i in inputs)

    @property
    def num_captures(self) -> int:
        return 1 if self.kind == "eagle" else len(self.aux_layers or (0, 0, 0))

    def check_target(self, target: ModelConfig) -> None:
        """Raises ConfigError or VocabularyError unless the head can draft for a target of this config."""
        if self.target_hidden_size != target.hidden_size:
            sizes = f"{self.target_hidden_size} values, not {target.hidden_size}"
            raise ConfigError(f"the head reads states of {sizes}; {TRAINED}")
        if self.layer.vocab_size != target.vocab_size:
            sizes = f"{self.layer.vocab_size} tokens, the target {target.vocab_size}"
            raise VocabularyError(f"the head knows {sizes}; {TRAINED}")
        self.captures(target.num_layers)

    def tensors(self, layer: str = "midlayer") -> dict[str, tuple[int, ...]]:
        """Shape of every tensor in a checkpoint by its published name; those of OPTIONAL may be missing.

        `layer`: the name of the decoder layer, "midlayer" (EAGLE-3) or "layers.0" (EAGLE-1, speculators).
        """
        c, hidden, reads_layers = self.layer, self.layer.hidden_size, self.kind != "eagle"
        wide = self.num_captures * self.target_hidden_size if reads_layers else 2 * hidden
        first = {"embed_tokens.weight": (c.vocab_size, hidden), "fc.weight": (hidden, wide)}
        shapes: dict[str, tuple[int, ...]] = {**first, **self._layers(layer, wide)}
        shapes |= {"norm.weight": (hidden,), "d2t": (self.draft_vocab_size,)} if reads_layers else {}
        return {**shapes, "lm_head.weight": (self.draft_vocab_size, hidden)}

    def _layers(self, layer: str, wide: int) -> dict[str, tuple[int, ...]]:
        """`tensors` between the ends; `wide`: values that fc reads."""
        c, third = self.layer, self.kind == "eagle3"
        shapes: dict[str, tuple[int, ...]] = {} if third else {"fc.bias": (c.hidden_size,)}
        if self.norm_before_fc:
            shapes["input_norm.weight"] = (wide,)
        if self.fc_norm:
            shapes |= {f"fc_norm.{i}.weight": (self.target_hidden_size,) for i in range(self.num_captures)}
        norms = ("input_layernorm", "hidden_norm") if third else ()
        width = 2 * c.hidden_size if third else c.hidden_size
        return shapes | layer_shapes(c, layer, (*norms, "post_attention_layernorm"), width)


@dataclass(frozen=True)
class BlockConfig(HeadConfig):
    """Shape and flags of a block head; `layer` holds the number and the sizes of its layers.

    `block_size`: tokens of a block, which are the last known token and masks (`mask_token`). `from_anchor`: every place
    predicts the token after itself, also the known token's place; otherwise each mask predicts the token in its own
    place. `markov_rank`: rank of the Markov head, whose bias depends on the token before; 0 for none. `causal`: for
    each layer, whether a place sees only itself and those before it, not the whole block. `conv`: taps, and columns of
    a group, of DFlash2's convolutions; no taps: none. `selector_rank`, `num_candidates`: of its selector; 0 for none.
    """

    block_size: int = 8
    mask_token: int = 0
    from_anchor: bool = False
    markov_rank: int = 0
    causal: tuple[bool, ...] = ()
    conv: tuple[int, int] = (0, 1)
    selector_rank: int = 0
    num_candidates: int = 0

    @property
    def num_guesses(self) -> int:
        """The number of tokens that the head was trained to draft."""
        return self.block_size if self.from_anchor else self.block_size - 1

    @property
    def convs(self) -> tuple[tuple[str, str], ...]:
        """The convolutions of each layer's attention and MLP by name, or none."""
        layers = range(self.layer.num_layers) if self.conv[0] else ()
        return tuple((f"layers.{i}.attention_conv", f"layers.{i}.mlp_conv") for i in layers)

    def _layers(self, layer: str, wide: int) -> dict[str, tuple[int, ...]]:
        c, (taps, group) = self.layer, self.conv
        shapes: dict[str, tuple[int, ...]] = {"hidden_norm.weight": (c.hidden_size,)}
        for i in range(c.num_layers):
            shapes |= layer_shapes(c, f"layers.{i}", ("input_layernorm", "post_attention_layernorm"))
        for at in (name for names in self.convs for name in names):
            shapes[f"{at}.base_kernel"] = (2, taps, c.hidden_size)
            shapes[f"{at}.kernel_projection.weight"] = (2 * taps * (c.hidden_size // group), c.hidden_size)
        if self.selector_rank:
            shapes[f"{SELECTOR[0]}.weight"] = (self.selector_rank, c.hidden_size)
            shapes |= {f"{table}.weight": (c.vocab_size, self.selector_rank) for table in CODEBOOKS}
        if self.markov_rank:
            shapes["markov_head.markov_w1.weight"] = (c.vocab_size, self.markov_rank)
            shapes["markov_head.markov_w2.weight"] = (self.draft_vocab_size, self.markov_rank)
        return shapes


def is_head(folder: Path) -> bool:
    """Whether a folder holds a draft head: by its config.json, or for old heads by the tensor fc.weight."""
    if folder.is_file() or not (folder / "config.json").exists():
        return False
    raw = read_json(folder / "config.json")
    if raw.get("speculators_model_type") is not None or architecture_of(raw) in HEADS:
        return True
    if raw.get("num_hidden_layers") != 1 or not any(folder.glob("*.safetensors")):
        return False
    from sameseed.models.checkpoint import Checkpoint

    with Checkpoint(folder) as files:
        return "fc.weight" in files


def rotation_of(target: Path) -> int | None:
    """The seed of the rotation that `sameseed quantize` applied to a model's hidden states, or None."""
    record = target / "quantization.json"  # written by `sameseed quantize` beside the weights
    found = read_json(record) if target.is_dir() and record.exists() else {}
    return found.get("seed") if "rotate" in str(found.get("method")).split("+") else None


def check_rotation(head: Path, target: Path) -> None:
    """Raise ConfigError for a head adapted to another rotation; log a notice once where a head may need adapting."""
    own, wanted = read_json(head / "config.json").get(ROTATED_FOR), rotation_of(target)
    if own is not None and own != wanted:
        seed, again = "none", ""
        if wanted is not None:
            seed, again = f"seed {wanted}", f", and turn it (sameseed quantize HEAD --head-for {target} -o DIR)"
        raise ConfigError(f"{head} was turned for seed {own}, {target} has {seed}; take the head before that{again}")
    if own is None and wanted is not None:
        say_once(
            f"{target} was rotated: a head for the model before it must be turned (sameseed quantize {head} --head-for "
            f"{target} -o DIR), one that was trained for the rotated model is right as it is"
        )


def is_block_config(raw: Mapping[str, Any]) -> bool:
    """Whether a config.json describes a block head."""
    algorithm = raw.get("speculators_model_type")
    return algorithm in BLOCKS or (algorithm is None and HEADS.get(architecture_of(raw)) == "block")


def is_block(folder: Path) -> bool:
    """Whether a draft head's folder holds a block head."""
    return is_block_config(read_json(folder / "config.json"))


def read_head_config(folder: Path) -> HeadConfig:
    """HeadConfig of a folder. Raises ModelLoadError naming the field."""
    return parse_head_config(read_json(folder / "config.json"), str(folder / "config.json"))


def parse_head_config(raw: Mapping[str, Any], where: str = "config.json") -> HeadConfig:
    """HeadConfig of a parsed config.json: plain, or of a speculator (with its layers in transformer_layer_config)."""
    algorithm, name, block = raw.get("speculators_model_type"), architecture_of(raw), is_block_config(raw)
    unnamed = "eagle3" if "draft_vocab_size" in raw else "eagle"  # heads of EAGLE's authors name their layer alone
    kind = "block" if block else HEADS.get(name, unnamed if name in LAYERS.values() else "")
    if not block and (kind in ("", "block") or algorithm not in (None, "eagle3")):
        found = str(algorithm or name)[:80]
        raise ModelLoadError(f"{where}: a draft head of kind {found!r} is not supported; these are: {', '.join(HEADS)}")
    inner: Any = raw if algorithm is None else raw.get("transformer_layer_config")
    own_key = "dflash_config" if block else "eagle_config"
    own = raw.get(own_key) or {}
    for key, value in (("transformer_layer_config", inner), (own_key, own)):
        if not isinstance(value, Mapping):
            raise ModelLoadError(f"{where}: {key} must be an object, got {str(value)[:80]}")
    settings, usual = {**own, **raw}, "qwen3" if block or "Qwen3" in name else "llama"
    model_type = one_of(inner.get("model_type", usual), LAYERS, f"{where}: a head of model_type")
    layer = {**inner, "architectures": [LAYERS[model_type]]}
    return (_block if block else _eagle)(kind, layer, settings, where)


def _sizes(settings: Mapping[str, Any], layer: ModelConfig, where: str) -> tuple[int, int]:
    """The sizes of a head's vocabulary, and of the target's hidden states."""
    usual = {"draft_vocab_size": layer.vocab_size, "target_hidden_size": layer.hidden_size}
    vocabulary, hidden = (whole_number(settings, where, name, size) for name, size in usual.items())
    return vocabulary, hidden


def _eagle(kind: str, inner: Mapping[str, Any], settings: Mapping[str, Any], where: str) -> HeadConfig:
    one_of(inner.get("num_hidden_layers", 1), [1], f"{where}: num_hidden_layers of an EAGLE head")
    kinds = inner.get("layer_types")  # may list the target's layers; the first entry is the head's
    slides = kinds[0] == "sliding_attention" if isinstance(kinds, list) and kinds else inner.get("use_sliding_window")
    window = inner.get("sliding_window") if slides else None
    layer = parse_config({**inner, "num_hidden_layers": 1}, where)
    layer = replace(layer, tied_embeddings=False, windows=(window if isinstance(window, int) else None,))
    one_of(settings.get("use_aux_hidden_state"), (None, True), f"{where}: use_aux_hidden_state")
    aux = settings.get("eagle_aux_hidden_state_layer_ids") or None
    if aux is not None and (not isinstance(aux, list) or any(type(v) is not int for v in aux)):
        raise ModelLoadError(f"{where}: eagle_aux_hidden_state_layer_ids must list layers, got {str(aux)[:80]}")
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    chosen = {flag: bool(settings.get(flag, False)) for flag in flags}
    return HeadConfig(kind, layer, *_sizes(settings, layer, where), None if aux is None else tuple(aux), **chosen)


def _block(kind: str, inner: Mapping[str, Any], settings: Mapping[str, Any], where: str) -> BlockConfig:
    from sameseed.batch import MAX_NODES  # late: it loads torch

    _refuse(inner, settings, where)
    layer = parse_config(inner, where)
    windows, causal = _sights(inner, settings, layer.num_layers, where)
    layer = replace(layer, tied_embeddings=False, windows=windows)
    spark = "dspark" in str(settings.get("speculators_model_type") or architecture_of(settings)).lower()
    rank = whole_number(settings, where, "markov_rank", 0, least=0) if spark else 0
    if rank:
        one_of(settings.get("markov_head_type", "vanilla"), ["vanilla"], f"{where}: markov_head_type")
    # Speculators list the layers whose inputs the head reads; the other layouts list those whose outputs it reads.
    name, later = "aux_hidden_state_layer_ids", 0
    if settings.get(name) is None:
        name, later = "target_layer_ids", 1
    aux = settings.get(name)
    if not isinstance(aux, list) or not aux or any(type(i) is not int for i in aux):
        raise ModelLoadError(f"{where}: {name} must list the target's layers that the head reads, got {str(aux)[:80]}")
    second = {name: whole_number(settings, where, name, 0, least=0) for name in DFLASH2}
    taps, group, rank_of_selector, candidates = second.values()
    if (taps and (not group or layer.hidden_size % group)) or bool(rank_of_selector) != bool(candidates):
        raise ModelLoadError(f"{where}: {', '.join(DFLASH2)} do not fit together, got {list(second.values())}")
    return BlockConfig(
        kind,
        layer,
        *_sizes(settings, layer, where),
        tuple(i + later for i in aux),
        causal=causal,
        conv=(taps, max(1, group)),
        selector_rank=rank_of_selector,
        num_candidates=candidates,
        block_size=whole_number(settings, where, "block_size", least=2, most=MAX_NODES),
        mask_token=whole_number(settings, where, "mask_token_id", least=0, most=layer.vocab_size - 1),
        from_anchor=bool(settings.get("sample_from_anchor", spark)),
        markov_rank=rank,
    )


def _sights(
    inner: Mapping[str, Any], settings: Mapping[str, Any], layers: int, where: str
) -> tuple[tuple[int | None, ...], tuple[bool, ...]]:
    """Each layer's window, and whether a place sees only the places before it, by the rules of vLLM and speculators."""
    usual = "sliding_attention" if inner.get("use_sliding_window") else "full_attention"
    kinds = inner.get("layer_types") or [usual] * layers  # may go on with the target's layers
    if not isinstance(kinds, list) or len(kinds) < layers:
        raise ModelLoadError(f"{where}: layer_types must list {layers} layers, got {str(kinds)[:80]}")
    slides = [kind == "sliding_attention" for kind in kinds[:layers]]
    causal = [slide and not settings.get("sliding_window_non_causal") for slide in slides]
    if settings.get("use_swa") and not any(slides):
        slides = [True] * layers
    said = next((settings[name] for name in ("is_causal", "causal") if settings.get(name) is not None), None)
    if said is not None:
        causal = [bool(said)] * layers
    window = whole_number(settings, where, "swa_window_size", inner.get("sliding_window") or 0, least=int(any(slides)))
    return tuple(window if slide else None for slide in slides), tuple(causal)


def _refuse(inner: Mapping[str, Any], settings: Mapping[str, Any], where: str) -> None:
    """Raise ModelLoadError for settings that change the computation and are not supported."""
    one_of(settings.get("projector_type", "dflash"), ("dflash", "dflash2"), f"{where}: projector_type")
    wanted = {"input_embedding_scale": 1, "output_multiplier": 1, "is_neox_style": True, "shift_label": False}
    for name, usual in wanted.items():
        one_of(settings.get(name), (None, usual), f"{where}: {name}")
    if settings.get("selector_rank") and settings.get("final_logit_softcapping"):
        raise ModelLoadError(f"{where}: a selector of logits with final_logit_softcapping is not supported")
