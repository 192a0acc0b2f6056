"""assistant drafter: the assistant of a Gemma 4 drafts a chain from the target's states, in the target's own cache."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from sameseed.batch import MAX_NODES, Rows, build_batch
from sameseed.drafters._chains import Chain, draft_of, lengthen
from sameseed.drafters._choices import Guesses
from sameseed.errors import ConfigError
from sameseed.fields import within
from sameseed.models.gemma import GemmaConfig
from sameseed.models.gemma_assistant import Assistant
from sameseed.request import Sequence
from sameseed.spec.draft import Draft
from sameseed.spec.drafter import Drafter, Parts, Span


class AssistantDrafter(Drafter):
    """An assistant has no cache of its own: nothing is computed for a prompt, and nothing is rolled back."""

    @dataclass(frozen=True)
    class Options(Drafter.Options):
        depth: int = within(8, 1, MAX_NODES, help="the most tokens of a draft; about 4 are what it is trained for")

    owns = "model"
    judges = True

    def __init__(self, options: Options, parts: Parts) -> None:
        """Raises ConfigError for a model that is no assistant, or another target's."""
        assert parts.runner is not None
        model, target = parts.runner.model, parts.target
        if not isinstance(model, Assistant):
            raise ConfigError(f"{model.config.architecture} is no assistant of a Gemma 4; name it without 'assistant:'")
        model.check_target(target.model)
        config = target.model.config
        assert isinstance(config, GemmaConfig)
        self.options, self.model, self.target, self.policy = options, model, target, parts.policy
        self.captures = (config.num_layers - 1,)
        self.guesses = Guesses(None, config.vocab_size, config.eos_token_ids)
        kinds = {window is None: config.caches[i] for i, window in enumerate(config.windows)}
        self.caches = tuple(target.cache.layers[kinds.get(full, kinds[True])] for full in (False, True))
        self._own: dict[int, tuple[int, Tensor]] = {}  # by sequence: committed tokens, and the state [S] of the last

    @property
    def limit(self) -> int:
        return self.model.max_model_len + 2  # drafts have the position before the last known token's

    def propose(self, seqs: Seq[Sequence], num_draft: Seq[int]) -> Draft:
        """Chains for all sequences together, one pass per token; confidence holds path probabilities."""
        chains = [Chain() for _ in seqs]
        depths = [min(self.options.depth, k, s.draft_depth) for s, k in zip(seqs, num_draft, strict=True)]
        known = [self._own.get(s.seq_id, (0, None))[0] for s in seqs]
        fits = [0 < n == s.num_cached == len(s) - 1 < self.limit - 1 for s, n in zip(seqs, known, strict=True)]
        active = [b for b, depth in enumerate(depths) if depth > 0 and fits[b]]
        states = torch.empty(0)
        if active:
            model = self.target.model
            states = torch.stack([self._own[seqs[b].seq_id][1] for b in active])
            states = model.ops.rms_norm(states, model.weights.norm, model.config.rms_eps)
        while active:
            logits, states = self._step([seqs[b] for b in active], [chains[b].tokens for b in active], states)
            for row, b in zip(self.guesses.rows(logits), active, strict=True):
                lengthen(chains[b], self.guesses, row, seqs[b], 1, self.policy.least_probability)
            going = [i for i, b in enumerate(active) if not chains[b].ended and len(chains[b].tokens) < depths[b]]
            if not going or self.policy.ends([chains[active[i]].sure for i in going]):
                break
            states, active = states[going], [active[i] for i in going]
        return draft_of(chains, num_draft, with_confidence=True)

    def _step(self, seqs: Seq[Sequence], chains: Seq[list[int]], states: Tensor) -> tuple[Tensor, Tensor]:
        """A pass over the last token of each chain, or of its text; states [B, S] are those before them."""
        last = [chain[-1] if chain else seq.token_ids[-1] for seq, chain in zip(seqs, chains, strict=True)]
        rows = [Rows([t], s.num_cached - 1, [], [], s.blocks, True) for s, t in zip(seqs, last, strict=True)]
        batch, target = build_batch(rows, self.target.cache.block_size), self.target.model
        embedding, scale = target.weights.embedding, math.sqrt(target.config.hidden_size)
        x = target.ops.embedding(batch.on(target.device).token_ids, embedding, scale)
        return self.model.draft(torch.cat([x, states], 1), batch, self.caches)

    def observe(self, seqs: Seq[Sequence], spans: Seq[Span], hidden: Tensor | None) -> None:
        if hidden is None:  # the policy rests: the states kept are too old to draft from
            return
        end = 0
        for seq, span in zip(seqs, spans, strict=True):
            end += span.end - span.start
            if span.end > span.start:
                self._own[seq.seq_id] = span.end, hidden[end - 1].clone()

    def release(self, seq: Sequence) -> None:
        self._own.pop(seq.seq_id, None)


DRAFTER = AssistantDrafter
