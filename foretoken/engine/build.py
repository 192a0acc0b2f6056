"""build_engine: from names and settings to a running Engine, with everything checked before memory is spent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence as Seq
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from foretoken import ops, registry
from foretoken.config import EngineConfig, SpecConfig
from foretoken.engine.calibrate import measure_curve
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
from foretoken.spec.drafter import Drafter, NoDrafter, Parts, parse_options
from foretoken.spec.policies import make_policy
from foretoken.tokenizer import Tokenizer

SELF_FORMAT = "w4a8"  # of a target that drafts for itself, where none is said


def build_engine(model: str, config: EngineConfig, progress: Progress | None = None) -> Engine:
    """Load the target, and the draft where `config.spec` names one, and put an Engine together.

    Raises ModelLoadError, ConfigError, VocabularyError or RegistryError, each with its remedy.
    """
    if config.threads is not None:
        ops.set_num_threads(config.threads)
    backend = ops.resolve(config.backend, config.device)
    quant = QuantScheme.parse(config.format)
    folder = resolve_model(model)
    shape = read_config(folder)
    max_len = config.max_model_len or shape.max_model_len
    if max_len > shape.max_model_len:
        raise ConfigError(f"max_model_len {max_len} is above the model's own {shape.max_model_len}; lower it")
    tokenizer = load_tokenizer(folder)
    check_options(config.spec)
    models = list(_models(config.spec, folder, quant))
    for m in models:
        check_vocabulary(tokenizer, load_tokenizer(m.folder))
    demands = [demand(folder, quant, config)]
    for m in models:
        own = demand(m.folder, m.quant, config)
        demands.append(replace(own, block=0) if m.shares_cache else own)
    num_blocks = plan_blocks(config, max_len, demands)
    target = load_model(folder, backend, quant, max_len, config.device, progress)
    drafts = []
    for m in models:
        draft_len = min(max_len, read_config(m.folder).max_model_len)
        drafts.append(load_model(m.folder, backend, m.quant, draft_len, config.device, progress))
    return assemble(config, tokenizer, num_blocks, target, drafts)


def check_options(spec: SpecConfig) -> None:
    """Raise ConfigError or RegistryError for a bad option of a level: it should not wait for the weights."""
    for level in _levels(spec):
        parse_options(_drafter_class(level), level.options)


def assemble(
    config: EngineConfig, tokenizer: Tokenizer, num_blocks: int, target: Llama, drafts: Seq[Llama] = ()
) -> Engine:
    """An Engine of models that are loaded already: caches of `num_blocks` blocks, drafter, length policy, scheduler.

    `drafts` are those of `config.spec`'s levels that need one: a level's own before those of the levels below it.
    """
    runner = _runner(target, config, num_blocks)
    drafter = _build_drafter(config.spec, config, num_blocks, runner, iter(drafts))
    max_len = config.max_model_len or target.max_model_len
    scheduler = Scheduler(runner.blocks, config.max_num_rows, config.max_num_seqs, max_len)
    return Engine(runner, drafter, drafter.policy, tokenizer, scheduler)


def _build_drafter(
    spec: SpecConfig, config: EngineConfig, num_blocks: int, target: ModelRunner, models: Iterator[Llama]
) -> Drafter:
    """The drafter of one level for `target`, whose captured layers it then decides, and those below it."""
    cls = _drafter_class(spec)
    own: ModelRunner | None = None
    if cls.of_target:
        own = ModelRunner(next(models), target.cache, blocks=target.blocks)
    elif cls.needs_model:
        own = _runner(next(models), config, num_blocks)
    wanted = "two drafters or more" if cls.num_below < 0 else f"{cls.num_below} drafter(s)"
    if len(spec.below) < 2 if cls.num_below < 0 else len(spec.below) != cls.num_below:
        raise ConfigError(
            f"drafter {spec.method!r} works with {wanted} below it, not {len(spec.below)}; write e.g. "
            "--draft 'suffix + embedded-draft' or --draft 'ngram > embedded-draft'"
        )
    below = tuple(_build_drafter(b, config, num_blocks, own or target, models) for b in spec.below)
    drafter = cls.build(parse_options(cls, spec.options), Parts(target, own, below))
    drafter.policy = make_policy(spec, partial(measure_curve, target))
    target.captures = drafter.captures
    return drafter


def _levels(spec: SpecConfig) -> Iterator[SpecConfig]:
    """A level and those below it, in the order in which their models are built."""
    if spec.method == "none":
        return
    yield spec
    for below in spec.below:
        yield from _levels(below)


def _drafter_class(spec: SpecConfig) -> type[Drafter]:
    if spec.method == "none":
        return NoDrafter
    found: type[Drafter] = registry.load("drafters", spec.method).DRAFTER
    return found


@dataclass(frozen=True)
class _Model:
    """A model that a level of drafting needs."""

    folder: Path
    quant: QuantScheme
    shares_cache: bool


def _models(spec: SpecConfig, folder: Path, quant: QuantScheme) -> Iterator[_Model]:
    """The models of all levels, in the order in which drafters are built; `folder`, `quant`: what they draft for.

    Raises ConfigError where a model is to draft for itself: it would cost what it saves.
    """
    if spec.method == "none":
        return
    cls, name = _drafter_class(spec), spec.model
    if cls.needs_model:
        if name is None and not cls.of_target:
            raise ConfigError(f"drafter {spec.method!r} needs a draft model; name one, e.g. --draft embedded-draft")
        own = folder if cls.of_target or name is None else resolve_model(name)
        own_quant = QuantScheme.parse(SELF_FORMAT if cls.of_target and spec.format == "auto" else spec.format)
        if (own.resolve(), own_quant) == (folder.resolve(), quant):
            raise ConfigError(
                f"{name or 'the target'} would draft for itself in the same format; take a smaller model, or a lower "
                "format for the draft (--draft-format)"
            )
        folder, quant = own, own_quant
        yield _Model(folder, quant, cls.of_target)
    for below in spec.below:
        yield from _models(below, folder, quant)


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
