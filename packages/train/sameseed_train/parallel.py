"""Training rows for a model that drafts over mask tokens, K tokens in one pass (PARD: An et al., 2025).

A token of a text is followed by up to K - 1 masks, at the positions of the tokens after it. Each mask attends to the
text up to that token and to the masks before itself, as in drafting. A share max(keep^i, least) of the masks at place i
is trained on (conditional drop), each together with all masks before it.

Letters: B texts of a batch, N tokens of a text, S = N + masks, R rows that are trained on.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sameseed.errors import ConfigError
from sameseed.models.config import ModelConfig, read_json
from sameseed.models.loader import load_tokenizer
from sameseed_train.states import TextStates


@dataclass(frozen=True)
class MaskSettings:
    """`tokens` are drafted in one pass over masks with the id `mask`; `keep`, `least`: see the module."""

    tokens: int
    mask: int
    keep: float = 0.7
    least: float = 0.2


@dataclass(frozen=True)
class MaskedRows:
    """Padded texts with their masks: ids, positions int64 [B, S]; seen bool [B, S, S]: which rows a row attends to.

    `counts` bool [B, S]: rows that are trained on. `places` int64 [R]: for each of these, in order, its row in `last`.
    `last` [., C]: the target's states at the positions after which rows draft.
    """

    ids: Tensor
    positions: Tensor
    seen: Tensor
    counts: Tensor
    places: Tensor
    last: Tensor


def chain_lengths(count: int, settings: MaskSettings, generator: torch.Generator) -> Tensor:
    """Masks after each of `count` tokens, int64: at least i with probability max(keep^i, least), at most K - 1."""
    rates = torch.tensor([max(settings.keep**i, settings.least) for i in range(1, settings.tokens)])
    drawn = torch.rand(count, 1, generator=generator)
    return (drawn < rates).sum(-1)


TextRows = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def text_rows(text: TextStates, width: int, settings: MaskSettings, generator: torch.Generator) -> TextRows:
    """One text's ids, positions [S], seen [S, S] and counts [S], as in `MaskedRows`, and its `last` [., C]."""
    n = len(text.states)
    first = min(n, max(0, text.num_given - 1))
    known, starts = torch.arange(n), torch.arange(first, n)
    lengths = torch.minimum(chain_lengths(len(starts), settings, generator), n - 1 - starts)
    chains = torch.repeat_interleave(torch.arange(len(starts)), lengths)
    ends = torch.repeat_interleave(starts, lengths)  # the last token that a mask sees
    depths = 1 + torch.arange(len(chains)) - torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
    positions = torch.cat((known, ends + depths))
    chain = torch.cat((torch.full((n,), -1), chains))  # -1: the text itself
    seen = (chain[:, None] == chain) & (positions <= positions[:, None])
    seen[n:, :n] = known <= ends[:, None]
    ids = torch.cat((text.ids[:n].long(), torch.full((len(chains),), settings.mask)))
    return ids, positions, seen, positions >= first, text.states[first:n, -width:].float()


def masked_rows(texts: list[TextStates], width: int, settings: MaskSettings, seed: int, device: str) -> MaskedRows:
    """Texts with masks after tokens to train on; `width`: C; `seed`: of the random drop."""
    generator = torch.Generator().manual_seed(seed)
    each = [text_rows(text, width, settings, generator) for text in texts]
    size = max(len(ids) for ids, *_ in each)
    ids, positions = torch.zeros(2, len(texts), size, dtype=torch.long)
    counts = torch.zeros(len(texts), size, dtype=torch.bool)
    seen = torch.eye(size, dtype=torch.bool).repeat(len(texts), 1, 1)  # padding sees itself
    places, before = list[Tensor](), 0
    for b, (own_ids, own_positions, own_seen, own_counts, last) in enumerate(each):
        n = len(own_ids)
        ids[b, :n], positions[b, :n], seen[b, :n, :n], counts[b, :n] = own_ids, own_positions, own_seen, own_counts
        at = own_positions[own_counts]
        places.append(before + at - (int(at.min()) if len(at) else 0))
        before += len(last)
    last = torch.cat([states for *_, states in each])
    return MaskedRows(*(t.to(device) for t in (ids, positions, seen, counts, torch.cat(places), last)))


def mask_of(asked: int, folder: Path, target: ModelConfig) -> int:
    """The id of the mask token: `asked`, or for -1 one that no text of the target (in `folder`) has.

    That is the target's padding token, or the first id that its tokenizer does not use. Raises ConfigError where there
    is none, or where `asked` is outside the vocabulary.
    """
    if asked >= target.vocab_size:
        raise ConfigError(f"mask_token {asked} is none of the target's {target.vocab_size} tokens; name one that is")
    if asked >= 0:
        return asked
    pad = None if folder.is_file() else read_json(folder / "config.json").get("pad_token_id")
    if (
        isinstance(pad, int)
        and 0 <= pad < target.vocab_size
        and pad not in (*target.eos_token_ids, target.bos_token_id)
    ):
        return pad
    used = set(load_tokenizer(folder).vocabulary().values())
    free = next((t for t in range(target.vocab_size) if t not in used), None)
    if free is None:
        raise ConfigError("every token of the target may be written; name one that no text has with --mask-token ID")
    return free
