"""build_engine: makes an Engine from names and settings, and checks everything before it allocates memory."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence as Seq
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

from sameseed import ops, registry, store
from sameseed.config import OWNS, EngineConfig, SpecConfig
from sameseed.cost.draft_format import chosen_scheme
from sameseed.cost.said import AUTO, SaidTokens, is_counted
from sameseed.drafters._vocabulary import Reducible, read_vocabulary
from sameseed.engine.calibrate import measure_rounds
from sameseed.engine.engine import Engine
from sameseed.engine.learned import learned_key, machine_here
from sameseed.engine.levels import NESTED, Level, drafter_for, resolve
from sameseed.engine.memory import Demand, demand, head_demand, plan_blocks
from sameseed.engine.overlap import make_overlap
from sameseed.engine.policies import RequestPolicies, make_policy
from sameseed.engine.scheduler import Scheduler
from sameseed.errors import ConfigError
from sameseed.kvcache.blocks import BlockManager
from sameseed.kvcache.cache import KVCache
from sameseed.kvcache.state import RecurrentStates
from sameseed.lengths.fixed import CappedLength
from sameseed.models.block import BlockHead, BlockRunner
from sameseed.models.config import ModelConfig, is_assistant
from sameseed.models.decoder import Decoder
from sameseed.models.draft_format import is_nested, is_smaller
from sameseed.models.eagle import EagleHead, HeadRunner
from sameseed.models.eagle_loader import load_head
from sameseed.models.head_config import is_head
from sameseed.models.inner import nested_view
from sameseed.models.loader import check_vocab, load_model, load_tokenizer, read_config, resolve_model, target_scheme
from sameseed.models.mtp import find_block, load_mtp
from sameseed.models.qwen35 import Qwen35
from sameseed.models.runner import ModelRunner
from sameseed.models.weights import Progress
from sameseed.scheme import QuantScheme, cache_format
from sameseed.spec.drafter import Below, Drafter, LengthPolicy, Parts
from sameseed.tokenizer import Tokenizer
from sameseed.tuned import Scope, Tuned

log = logging.getLogger("sameseed")
Model = Decoder | EagleHead | BlockHead
FIRST_SECONDS = 0.15  # for passes, and as much for rounds, that goodput measures once per machine and model
SELF_FORMAT = "w4a8"  # draft format of a target that drafts for itself, if none is given and none is nested


@dataclass(frozen=True)
class Loaded:
    """Loaded parts for engines: settings in which draft heads are recognized, models, and blocks of each cache.

    `drafts`: the models of the levels in `config.spec` that need one, each level before the levels below it.
    """

    config: EngineConfig
    tokenizer: Tokenizer
    num_blocks: int
    target: Decoder
    drafts: tuple[Model, ...] = ()
    learned: str | None = None  # the key under which goodput stores what it learns; None: nothing is stored
    said: SaidTokens | None = None  # for drafts of tokens that the target says


def build_engine(
    model: str, config: EngineConfig, progress: Progress | None = None, target: ModelRunner | None = None
) -> Engine:
    """Load the target and the drafts, and assemble an Engine. Raises SameseedError, with a remedy.

    `target`: the runner of another engine with the same settings. Both engines then share its cache, so only one of
    them may have requests.
    """
    return assemble(load_parts(model, config, progress, None if target is None else target.model), target)


def load_parts(
    model: str, config: EngineConfig, progress: Progress | None = None, target: Decoder | None = None
) -> Loaded:
    """Load the target (unless it is given) and the drafts, for `assemble`. Raises as `build_engine`."""
    if config.threads is not None:
        ops.set_num_threads(config.threads)
    backend = ops.resolve(config.backend, config.device)
    folder = resolve_model(model)
    if is_head(folder) or is_assistant(folder):
        raise ConfigError(f"{model} is a draft head, not a model; name its target as the model, and it with --draft")
    quant = target_scheme(config.format, folder)
    config = heed_profile(config, folder)
    shape = read_config(folder)
    max_len = config.max_model_len or shape.max_model_len
    if max_len > shape.max_model_len:
        raise ConfigError(f"max_model_len {max_len} is above the model's own {shape.max_model_len}; lower it")
    level, models, (own, *others) = check_parts(folder, config)
    tokenizer = load_tokenizer(folder)
    config = replace(config, spec=level.spec)
    if config.template_date is not None:
        tokenizer.now = datetime.fromisoformat(config.template_date)
    own = own if target is None else replace(own, weights=0)  # its weights are in memory already
    num_blocks = plan_blocks(config, max_len, [own, *others])
    if target is None:
        target = load_model(folder, backend, quant, max_len, config.device, progress)
    drafts: list[Model] = []
    for m in models:
        owner = target if m.owner is None else drafts[m.owner]
        assert isinstance(owner, Decoder)
        if m.is_view:
            drafts.append(nested_view(owner))
        elif m.cls.inside:
            assert isinstance(owner, Qwen35)
            drafts.append(load_mtp(m.folder, owner, backend, m.quant, config.device, progress))
        elif m.cls.owns == "head":
            drafts.append(load_head(m.folder, owner, backend, m.quant, config.device, progress))
        else:
            draft_len = min(max_len, read_config(m.folder).max_model_len)
            drafts.append(load_model(m.folder, backend, m.quant, draft_len, config.device, progress))
    used = [(folder, quant), *((m.folder, m.quant) for m in models)]
    key = learned_key(config, used) if config.spec.policy == "goodput" else None
    counted = any(is_counted(_vocabulary(each)) for each in level.every())
    said = SaidTokens(folder, target.config.vocab_size) if counted else None
    return Loaded(config, tokenizer, num_blocks, target, tuple(drafts), key, said)


def heed_profile(config: EngineConfig, folder: Path) -> EngineConfig:
    """The settings, checked against their profile: above the batch sizes that were tuned, goodput decides.

    Raises ConfigError for a profile of another machine or of other weights, unless `force_profile` is set.
    """
    if config.profile is None:
        return config
    tuned = Tuned.read(config.profile)
    why = tuned.machine.differs(machine_here(config.device))
    if why is None and tuned.model.digest not in ("", found := store.weights_key(folder)):
        why = f"weights {tuned.model.digest} there, {found} here"
    said = f"profile {config.profile} was tuned for something else ({why})"
    if why is not None and not config.force_profile:
        raise ConfigError(f"{said}; run `sameseed tune` again, or give --force-profile")
    if why is not None:
        log.warning("%s; it is used all the same", said)
    most, tried = config.max_num_seqs, max(tuned.scope.batch, default=config.max_num_seqs)
    if most <= tried or config.spec.policy == "goodput" or config.spec.method == "none":
        return config
    log.warning("%s was tuned for up to %d sequences, not %d: goodput decides", config.profile, tried, most)
    return replace(config, spec=replace(config.spec, policy="goodput"))


class CheckedParts(NamedTuple):
    """Drafting levels, draft models, and the memory demands of the target (first) and each draft model."""

    level: Level
    models: list[_Model]
    demands: list[Demand]


def check_parts(folder: Path, config: EngineConfig) -> CheckedParts:
    """What an engine with these settings would be made of; no weights are read.

    Raises ConfigError, VocabularyError, RegistryError or ModelLoadError for settings and drafts that do not fit.
    """
    quant = target_scheme(config.format, folder)
    level = resolve(config.spec)
    level.check()
    if config.spec.overlap and config.device != "cpu":
        raise ConfigError("--overlap shares the cores of a CPU between target and draft; leave it out on a GPU")
    for each in level.every():
        if (text := _vocabulary(each)) not in ("", AUTO):
            read_vocabulary(text, read_config(folder).vocab_size)
    models = models_of(level, folder, quant, config.device)
    for m in models:
        has_tokens = m.cls.owns != "head" or (m.folder / "tokenizer.json").exists()
        if has_tokens:
            check_vocab(folder, m.folder)
        if m.cls.owns == "target" and read_config(m.target).state_shapes:
            raise ConfigError("low-bit drafts would overwrite a recurrent state; take --draft ngram, suffix or mtp")
    demands = [demand(folder, quant, config)]
    for m in (m for m in models if not m.is_view):
        head = head_demand(m.folder, m.quant, config, m.target) if m.cls.owns == "head" else None
        own = head or demand(m.folder, m.quant, config)
        demands.append(replace(own, block=0) if m.cls.owns == "target" else own)
    return CheckedParts(level, models, demands)


def assemble(parts: Loaded, runner: ModelRunner | None = None) -> Engine:
    """An Engine of loaded models with drafter, length policy and scheduler; `runner`: the target's, if there is one."""
    config = parts.config
    runner = runner or _runner(parts.target, config, parts.num_blocks)
    scope = Scope() if config.profile is None else Tuned.read(config.profile).scope
    policies = RequestPolicies(make_policy(config.spec), scope, parts.said)
    drafter = _build_drafter(Level.of(config.spec), parts, runner, policies, iter(parts.drafts))
    max_len = config.max_model_len or runner.model.max_model_len
    scheduler = Scheduler(runner.blocks, config.max_num_rows, config.max_num_seqs, max_len)
    capturing = runner.beside(captures=drafter.captures)
    policies.follow(drafter)
    policies.calibrate(partial(measure_rounds, capturing, drafter, FIRST_SECONDS), parts.learned)
    return Engine(
        capturing, drafter, policies, parts.tokenizer, scheduler, make_overlap(config.spec), config.max_pass_ms / 1000
    )


def _build_drafter(
    level: Level, parts: Loaded, target: ModelRunner, policy: LengthPolicy, models: Iterator[Model]
) -> Drafter:
    """The drafter of one level for `target`, and those below it."""
    if isinstance(level.spec.drafter, Drafter):
        return level.spec.drafter
    cls = level.cls
    own: ModelRunner | None = None
    head: HeadRunner | BlockRunner | None = None
    if cls.owns:
        model = next(models)
        if isinstance(model, EagleHead | BlockHead):
            cache = _cache(model.config.layer, model.weights.dense, parts.config, parts.num_blocks)
            head = HeadRunner(model, cache) if isinstance(model, EagleHead) else BlockRunner(model, cache)
        elif cls.owns == "target":
            own = target.beside(model)
        else:
            own = _runner(model, parts.config, parts.num_blocks)
    below: list[Below] = []
    for b in level.below:
        # Drafters below one without a model draft for the same target, so the same policy ends their drafts.
        shares = not cls.owns and b.spec.policy == "fixed" and b.spec.confidence is None
        lower = CappedLength(b.spec.num_draft_tokens, policy) if shares else make_policy(b.spec)
        drafter = _build_drafter(b, parts, own or target, lower, models)
        if not shares:
            lower.calibrate(partial(measure_rounds, (own or target).beside(captures=drafter.captures), drafter))
        below.append(Below(drafter, lower))
    if own is not None:
        own = own.beside(captures=tuple(sorted({layer for b in below for layer in b.drafter.captures})))
    options: Any = level.options
    vocabulary = _vocabulary(level)
    counted = is_counted(vocabulary) and (parts.said is not None or vocabulary == AUTO)
    made: Any = cls.build(
        replace(options, vocabulary="") if counted else options, Parts(target, policy, own, tuple(below), head)
    )
    if counted and parts.said is not None:
        parts.said.follow(made, target.model.weights.read_bytes, vocabulary)
    return cast(Drafter, made)


def _vocabulary(level: Level) -> str:
    """What a level's LM head may draft; "" for drafters without one, to which an option of this name is their own."""
    return getattr(level.options, "vocabulary", "") if issubclass(level.cls, Reducible) else ""


@dataclass(frozen=True)
class _Model:
    """A model that a drafter of class `cls` needs. `owner`: the index of the model that it drafts for, if no target."""

    cls: type[Drafter]
    folder: Path
    quant: QuantScheme
    is_view: bool  # low-bit weights inside the owner's weights: nothing is loaded
    target: Path
    owner: int | None


def models_of(
    level: Level,
    folder: Path,
    quant: QuantScheme,
    device: str = "cpu",
    before: Seq[_Model] = (),
    owner: int | None = None,
) -> list[_Model]:
    """The models `before`, then those of a level and below, as drafters are built; `folder`, `quant`: of its target.

    Raises ConfigError if a model would draft for itself in as many bits: that would cost what it saves.
    """
    cls, spec, found = level.cls, level.spec, list(before)
    if cls.owns:
        own, of_target = _draft_folder(spec, cls, folder), cls.owns == "target"
        is_view = of_target and spec.format in (NESTED, "auto") and is_nested(folder, quant)
        if spec.format == NESTED and not is_view:
            able = [n for n, module in registry.loaded("drafters").items() if module.DRAFTER.owns == "target"]
            raise ConfigError(
                f"no lower weights are nested in the target's ({quant}) for drafter {spec.method!r}: they are for "
                f"--draft {' or '.join(able)} and a target in --format w8a8n; or take another --draft-format, e.g. w4a8"
            )
        if is_view or (cls.inside and spec.format == "auto"):
            own_quant = quant
        elif spec.format != "auto":
            own_quant = QuantScheme.parse(spec.format)
        else:  # chosen to fit its target
            own_quant = QuantScheme.parse(SELF_FORMAT) if of_target else chosen_scheme(own, folder, quant, device)
        is_itself = not (is_view or cls.inside) and own.resolve() == folder.resolve()
        if is_itself and not is_smaller(folder, own_quant.with_head(), quant):
            raise ConfigError(
                f"{spec.model or 'the target'} would draft for itself in as many bits ({own_quant}; the target: "
                f"{quant}); take a smaller model, or a lower format for the draft (--draft-format)"
            )
        found.append(_Model(cls, own, own_quant, is_view, folder, owner))
        folder, quant, owner = own, own_quant, len(found) - 1
    for below in level.below:
        found = models_of(below, folder, quant, device, found, owner)
    return found


def _draft_folder(spec: SpecConfig, cls: type[Drafter], folder: Path) -> Path:
    """The folder of the model or head that a level drafts with; `folder`: its target's. Raises ConfigError."""
    name = spec.model
    if isinstance(spec.drafter, Drafter):
        raise ConfigError(f"drafter {spec.method!r} owns a model, which its `build` gets; give its class, no object")
    if cls.inside:
        return find_block(folder if name is None else resolve_model(name))[0]
    if cls.owns == "target":
        return folder
    if name is None:
        one = "head of this target; name its folder, e.g. --draft path/to/head" if cls.owns == "head" else ""
        one = one or "model; name one, e.g. --draft embedded-draft"
        raise ConfigError(f"drafter {spec.method!r} needs a draft {one}")
    own = resolve_model(name)
    usual = drafter_for(own)
    alone = {spec.method, usual} & {"eagle", "block", "assistant", "mtp"}
    if OWNS[usual] != cls.owns or (spec.method in OWNS and spec.method != usual and alone):
        raise ConfigError(f"drafter {spec.method!r} cannot draft with {name}; write --draft {usual}:{name}")
    return own


def _runner(model: Decoder, config: EngineConfig, num_blocks: int) -> ModelRunner:
    slots = config.max_num_seqs if model.config.state_shapes else 0
    blocks = BlockManager(num_blocks, config.cache.block_size, config.cache.prefix_cache, slots)
    return ModelRunner(model, _cache(model.config, model.weights.dense, config, num_blocks), blocks=blocks)


def _cache(c: ModelConfig, dense: str, config: EngineConfig, num_blocks: int) -> KVCache:
    name = cache_format(config.cache.format, dense)
    states = RecurrentStates(c.state_shapes, config.max_num_seqs, config.device) if c.state_shapes else None
    return KVCache(c.kv_shapes, num_blocks, config.cache.block_size, name, config.device, states)
