"""The model cards of heads and drafts that were trained on a target's own texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sameseed.models.head_config import BlockConfig, HeadConfig
from sameseed_train.card import FRONT_MATTER, source_table, table
from sameseed_train.head_measure import NEW_TOKENS, NUM_DRAFT_TOKENS
from sameseed_train.head_recipe import HeadRecipe
from sameseed_train.model import ModelShape
from sameseed_train.own import OwnRecipe


def write_head_card(recipe: HeadRecipe, config: HeadConfig, results: dict[str, Any], folder: Path) -> None:
    """README.md of a head."""
    layer, own, loss = config.layer, config.draft_vocab_size, recipe.loss
    what = f"has {own} of the target's {layer.vocab_size} tokens"
    if own == layer.vocab_size:
        what = "shares embedding and LM head with its target"
    if isinstance(config, BlockConfig):
        text = _block(recipe, config, what, results)
        write_card(recipe, results, text, acceptance(results) if "acceptance" in results else "", folder)
        return
    text = (
        f"EAGLE-3 head (Li et al., 2025) for `{recipe.target}`, {results['parameters'] / 1e6:.2f} M parameters of its "
        f"own: one layer, hidden {layer.hidden_size}, {layer.num_heads} heads and {layer.num_kv_heads} KV heads of "
        f"{layer.head_dim}, feed-forward {layer.intermediate_size}; it reads what enters the target's layers "
        f"{', '.join(map(str, results['layers']))}, and {what}. bfloat16, in the layout `LlamaForCausalLMEagle3`.\n\n"
        f"{training(recipe, results)} At {loss.unroll} steps on its own features (training-time test; step s "
        f"counts {loss.falloff:g}^s; the first {loss.alone:.0%} of the updates learn step 0 alone) the "
        f"loss is KL(target || head) plus {loss.argmax_weight:g} times the cross entropy on the target's argmax."
        f" The layer began as the target's last. {computed(results)}\n\n"
    )
    write_card(recipe, results, text, acceptance(results) if "acceptance" in results else "", folder)


def computed(results: dict[str, Any]) -> str:
    """The card's sentence on what the head was trained against."""
    own = results["recipe"]
    return (
        f"It was trained against what the engine computes for the target in format {own['format']} (embedding: "
        f"{results['embedding']}, KV cache: {own['kv_format']}), not against weights before their rounding."
    )


def _block(recipe: HeadRecipe, config: BlockConfig, what: str, results: dict[str, Any]) -> str:
    """The card's description of a block head and of its training."""
    layer, block = config.layer, recipe.block
    rank = config.markov_rank
    markov = f" A Markov head of rank {rank} tells a place the token before it." if rank else ""
    return (
        f"Block head (DFlash: Chen et al., 2026; DSpark: DeepSeek-AI, 2026) for `{recipe.target}`, "
        f"{results['parameters'] / 1e6:.2f} M parameters of its own: {layer.num_layers} layers, hidden "
        f"{layer.hidden_size}, {layer.num_heads} heads and {layer.num_kv_heads} KV heads of {layer.head_dim}, "
        f"feed-forward {layer.intermediate_size}; it guesses {config.num_guesses} tokens in one pass, over masks of "
        f"the id {config.mask_token}. It reads what enters the target's layers "
        f"{', '.join(map(str, results['layers']))}, and {what}.{markov} bfloat16, in the layout of speculators.\n\n"
        f"{training(recipe, results)} The loss is KL(target || head) plus {recipe.loss.argmax_weight:g} times the "
        f"cross entropy on the target's argmax; guess g of a block counts exp(-g / {block.decay:g}); a text gave up to "
        f"{block.anchors} blocks an update. The layers began as the target's last.\n\n"
    )


def write_draft_card(recipe: OwnRecipe, shape: ModelShape, results: dict[str, Any], folder: Path) -> None:
    """README.md of a draft."""
    own = results["recipe"]
    parallel = f" It began with the weights of `{own['begin']}`." if own["begin"] else ""
    if own["parallel"]:
        parallel += (
            f" It guesses up to {own['parallel']} tokens in one pass, over mask tokens (PARD: An et al., 2025); of "
            f"guesses behind i masks a share max({own['keep']:g}^i, {own['least_kept']:g}) was learned from."
        )
    text = (
        f"Llama draft for `{recipe.target}`, {results['parameters'] / 1e6:.2f} M parameters: {shape.num_layers} "
        f"layers, hidden {shape.hidden_size}, {shape.num_heads} heads and {shape.num_kv_heads} KV heads of "
        f"{shape.head_dim}, feed-forward {shape.intermediate_size}, the target's tokenizer, tied embeddings, bfloat16."
        "\n\n"
        f"{training(recipe, results)}{parallel}\n\n"
    )
    write_card(recipe, results, text, "", folder)


def write_card(recipe: OwnRecipe, results: dict[str, Any], text: str, measured: str, folder: Path) -> None:
    """Write README.md: title, text, the mixture's sources and licences (if used), measurements, the recipe's note."""
    data = ""
    if recipe.source:
        sources = source_table(recipe.source)
        data = f"## Data\n\nPrompts come from these sources; none is held out:\n\n{sources}\n\n"
    parts = [FRONT_MATTER, f"# sameseed {recipe.name}\n\n", text, data, measured, note(results)]
    (folder / "README.md").write_text("".join(parts), encoding="utf-8")


def training(recipe: OwnRecipe, results: dict[str, Any]) -> str:
    """The card's description of the training's length and data."""
    done, texts = results["training"], recipe.texts
    return (
        f"Trained (seed {recipe.seed}) for {done['step']} steps of {recipe.train.rows} texts, "
        f"{done['tokens'] / 1e6:.2f} M guesses, on {results['texts']} texts with {results['text_tokens'] / 1e6:.2f} M "
        "tokens to learn from: "
        f"{texts.corpus_share:.0%} documents, the others what the target (format {recipe.format}) wrote by itself, at "
        f"most {texts.new_tokens} tokens a prompt, {texts.greedy:.0%} greedily, the rest at temperature "
        f"{texts.temperature:g}. Only tokens that the target wrote, or all of a document, count."
    )


def acceptance(results: dict[str, Any]) -> str:
    """The card's table of the acceptance of greedy chains, by domain."""
    k = NUM_DRAFT_TOKENS
    head = "domain | tokens | drafted | accepted | acceptance | " + " | ".join(f"guess {i + 1}" for i in range(k))
    rows = []
    for domain, v in results["acceptance"].items():
        shares = (f"{share:.3f}" for share in (v["rate"], *v["agreement"]))
        rows.append((domain, v["tokens"], v["drafted"], v["accepted"], *shares))
    guesses = " | ".join(f"guess {i + 1}" for i in range(k))
    curve = table(
        f"updates | guesses trained on | different tokens | acceptance | {guesses}",
        0,
        [
            (v["step"], v["tokens"], v["text_tokens"], *(f"{share:.3f}" for share in (v["rate"], *v["agreement"])))
            for v in results["curve"]
        ],
    )
    return (
        f"## Acceptance\n\nGreedy, chains of {k} guesses (what follows a rejected one counts as drafted; none is past "
        f'the text\'s end), on what the target writes to held-out prompts, {NEW_TOKENS} tokens at most. "guess i": how '
        f"often the head's i-th guess is right after i - 1 right ones, over all places.\n\n{table(head, 1, rows)}\n\n"
        f"While training, at rates of learning that had not yet fallen but for the last of each run:\n\n{curve}\n\n"
    )


def note(results: dict[str, Any]) -> str:
    """The recipe's note, from results.json, as the card's last section."""
    words = results["recipe"]["note"].strip()
    return f"## Limits\n\n{words}\n" if words else ""
