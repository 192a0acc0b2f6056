"""Replayer: texts of one target, and replays of drafts along them; loads the target only for what is not stored.

Texts and replays are stored on disk by digest: of weights, formats, prompts and sampling; of replays, also the draft.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import sameseed
from sameseed import ops, store
from sameseed.config import EngineConfig, SpecConfig
from sameseed.cost.said import is_counted
from sameseed.engine.build import build_engine
from sameseed.engine.engine import Engine
from sameseed.engine.levels import Level, resolve
from sameseed.engine.settings import make_config
from sameseed.errors import ConfigError
from sameseed.laws.subject import storeless
from sameseed.measure.workload import Workload, spec_as_dict, without_past
from sameseed.models.loader import read_config, resolve_model
from sameseed.models.runner import ModelRunner
from sameseed.plan.acceptance import Replay, sizes_up_to
from sameseed.plan.replay import SPARE, replay
from sameseed.plan.texts import Texts, Tick, prompts_of, read_texts, write_texts

SCHEMA = 3  # version of what is stored, and of how it is measured


class Replayer:
    """Texts and replays of one target in one format."""

    def __init__(
        self,
        model: str,
        settings: Mapping[str, Any] | None = None,
        batch_size: int = 8,
        target: ModelRunner | None = None,
    ) -> None:
        """`settings`: keyword arguments of LLM, without a draft. `batch_size`: texts that run together.

        `target`: a target loaded already with the same settings, which nothing else uses meanwhile.
        """
        own = {name: value for name, value in (settings or {}).items() if name != "num_blocks"}
        self.model = model
        self.config = make_config(None, **{**own, "max_num_seqs": batch_size, "prefix_cache": False})
        self.target = target

    def texts(self, workload: Workload, tick: Tick = lambda done, total: None) -> Texts:
        """What the target writes for a workload, read from the store where it is there.

        Raises ConfigError for a workload without prompts, or whose texts do not end by themselves; RequestError for a
        prompt that does not fit; and what `build_engine` raises.
        """
        prompts_of(workload)
        asked = {"prompts": workload.prompts, "params": asdict(workload.params)}
        asked |= {"stops": workload.stops} if any(workload.stops) else {}
        key = store.digest({**self._key(), **asked})
        if (kept := store.read("texts", key)) is not None:
            return read_texts(workload, kept, key)
        longest = max(map(len, workload.prompts)) + workload.params.max_tokens
        written = write_texts(self._engine(SpecConfig(), longest), workload, key, tick)
        store.write("texts", key, written.as_arrays())
        return written

    def replay(
        self, spec: SpecConfig, texts: Texts, num_draft_tokens: int = 16, tick: Tick = lambda done, total: None
    ) -> Replay:
        """What drafts of up to `num_draft_tokens` tokens are worth along texts of this target, from the store if there.

        Raises ConfigError for plain decoding or a size out of range, and what `build_engine` raises.
        """
        sizes, spec = sizes_up_to(num_draft_tokens), _alone(spec)
        counted = any(is_counted(level.options) for level in Level.of(spec).every())  # it changes with the outputs
        own = counted or spec.drafter is not None or not texts.key  # these have no digest, so they are not stored
        key = "" if own else store.digest({**self._key(), "texts": texts.key, "draft": _draft_key(spec)})
        kept = store.read("replays", key) if key else None
        if kept is not None and set(sizes) <= set((known := Replay.from_arrays(kept)).sizes):
            return known.only(sizes)
        engine = self._engine(
            replace(spec, num_draft_tokens=num_draft_tokens, policy="fixed", overlap=0), texts.longest
        )
        found = replay(engine, spec, texts, num_draft_tokens, self.config.max_num_seqs, tick)
        if key:
            store.write("replays", key, found.as_arrays())
        return found

    def _engine(self, spec: SpecConfig, longest: int) -> Engine:
        """An engine of the target, which is loaded when first needed, and again for longer texts."""
        own = self.config.max_model_len
        if self.target is not None and own is None and self.target.model.max_model_len < longest:
            self.target = None
        if own is None:
            model_len = read_config(resolve_model(self.model)).max_model_len
            own = min(model_len, longest + SPARE) if self.target is None else self.target.model.max_model_len
        engine = build_engine(self.model, replace(self.config, spec=spec, max_model_len=own), target=self.target)
        self.target = engine.runner if self.target is None else self.target
        return engine

    def _key(self) -> dict[str, object]:
        c: EngineConfig = self.config
        return {
            "schema": SCHEMA,
            "version": sameseed.__version__,
            "weights": store.weights_key(resolve_model(self.model)),
            "format": c.format,
            "kv_format": c.cache.format,
            "backend": ops.resolve(c.backend, c.device).name,
            "device": c.device,
            "max_model_len": c.max_model_len,
        }


def _alone(spec: SpecConfig) -> SpecConfig:
    """The same levels without a store and without past requests to remember, unless their options ask for these.

    Raises ConfigError for plain decoding.
    """
    if spec.method == "none":
        raise ConfigError("plain decoding has no drafts to replay; name a draft, e.g. --draft ngram")
    return storeless(without_past(resolve(spec).spec))


def _draft_key(spec: SpecConfig) -> object:
    """All that a drafter's proposals depend on, beside target and texts."""
    one = {**spec_as_dict(replace(spec, num_draft_tokens=1, policy="fixed", overlap=0, below=()))}
    one["draft_model"] = None if spec.model is None else store.weights_key(resolve_model(spec.model))
    return [one, [[b.num_draft_tokens, b.policy, _draft_key(b)] for b in spec.below]]
