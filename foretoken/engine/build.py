"""build_engine: from names and settings to a running Engine, with everything checked before memory is spent."""

from __future__ import annotations

from pathlib import Path

from foretoken import ops, registry
from foretoken.config import EngineConfig
from foretoken.engine.engine import Engine
from foretoken.engine.memory import demand, kv_format, plan_blocks
from foretoken.engine.scheduler import Scheduler
from foretoken.errors import ConfigError, VocabularyError
from foretoken.formats.scheme import QuantScheme
from foretoken.kvcache.cache import KVCache
from foretoken.models.config import read_config
from foretoken.models.llama import Llama
from foretoken.models.loader import load_model, load_tokenizer, resolve_model
from foretoken.models.runner import ModelRunner
from foretoken.models.weights import Progress
from foretoken.spec.drafter import Drafter, NoDrafter, parse_options
from foretoken.spec.length import make_policy
from foretoken.tokenizer import Tokenizer


def build_engine(model: str, config: EngineConfig, progress: Progress | None = None) -> Engine:
    """Load the target, and the draft where `config.spec` names one, and put an Engine together.

    Raises ModelLoadError, ConfigError, VocabularyError or RegistryError, each with its remedy.
    """
    if config.threads is not None:
        ops.set_num_threads(config.threads)
    backend = ops.resolve(config.backend, config.device)
    quant, draft_quant = QuantScheme.parse(config.format), QuantScheme.parse(config.spec.format)
    folder = resolve_model(model)
    shape = read_config(folder)
    max_len = config.max_model_len or shape.max_model_len
    if max_len > shape.max_model_len:
        raise ConfigError(f"max_model_len {max_len} is above the model's own {shape.max_model_len}; lower it")
    draft_class = _drafter_class(config)
    tokenizer = load_tokenizer(folder)
    if draft_class is not None:
        parse_options(draft_class, config.spec.options)  # a bad option should not wait for the weights
    draft_folder: Path | None = None
    if draft_class is not None and draft_class.needs_model:
        if config.spec.model is None:
            raise ConfigError(
                f"drafter {config.spec.method!r} needs a draft model; name one, e.g. --draft embedded-draft"
            )
        draft_folder = resolve_model(config.spec.model)
        check_vocabulary(tokenizer, load_tokenizer(draft_folder))
    demands = [demand(folder, quant, config)]
    if draft_folder is not None:
        demands.append(demand(draft_folder, draft_quant, config))
    num_blocks = plan_blocks(config, max_len, demands)
    target = load_model(folder, backend, quant, max_len, config.device, progress)
    draft: Llama | None = None
    if draft_folder is not None:
        draft_len = min(max_len, read_config(draft_folder).max_model_len)
        draft = load_model(draft_folder, backend, draft_quant, draft_len, config.device, progress)
    return assemble(config, tokenizer, num_blocks, target, draft)


def assemble(
    config: EngineConfig, tokenizer: Tokenizer, num_blocks: int, target: Llama, draft: Llama | None = None
) -> Engine:
    """An Engine of models that are loaded already: caches of `num_blocks` blocks, drafter, length policy, scheduler."""
    runner = _runner(target, config, num_blocks)
    draft_class = _drafter_class(config)
    drafter: Drafter = NoDrafter()
    if draft_class is not None:
        options = parse_options(draft_class, config.spec.options)
        draft_runner = None if draft is None else _runner(draft, config, num_blocks)
        drafter = draft_class.build(options, draft_runner, target.config.vocab_size)
    runner.captures = drafter.captures
    policy = make_policy(config.spec)
    drafter.policy = policy
    max_len = config.max_model_len or target.max_model_len
    scheduler = Scheduler(runner.blocks, config.max_num_rows, config.max_num_seqs, max_len)
    return Engine(runner, drafter, policy, tokenizer, scheduler)


def _drafter_class(config: EngineConfig) -> type[Drafter] | None:
    if config.spec.method == "none":
        return None
    found: type[Drafter] = registry.load("drafters", config.spec.method).DRAFTER
    return found


def _runner(model: Llama, config: EngineConfig, num_blocks: int) -> ModelRunner:
    c = model.config
    cache = KVCache(
        c.num_layers,
        num_blocks,
        config.cache.block_size,
        c.num_kv_heads,
        c.head_dim,
        kv_format(model.weights.dense, config),
        config.device,
    )
    return ModelRunner(model, cache)


def check_vocabulary(target: Tokenizer, draft: Tokenizer) -> None:
    """Raise VocabularyError unless both tokenizers spell every token of the smaller one alike (padding is no token)."""
    mine, its = target.vocabulary(), draft.vocabulary()
    for piece, token in sorted(its.items(), key=lambda item: item[1]):
        if mine.get(piece) != token:
            other = target.token(token)
            raise VocabularyError(
                f"the draft model has another vocabulary: its token {token} is {piece!r}, the target's is {other!r}; "
                "use a draft of the target's own family"
            )
    if len(its) < len(mine):
        piece, token = next((p, t) for p, t in sorted(mine.items(), key=lambda item: item[1]) if p not in its)
        raise VocabularyError(
            f"the draft model lacks the target's token {token} ({piece!r}); use a draft with the target's own tokenizer"
        )
