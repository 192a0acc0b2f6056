"""Memory on paper: what a model with a draft takes, what fits beside it, and what to do where nothing fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from contextlib import suppress
from dataclasses import dataclass

from sameseed.batch import MAX_NODES
from sameseed.cost.round import MAX_NUM_ROWS
from sameseed.engine.memory import GIB, pass_bytes
from sameseed.errors import ConfigError
from sameseed.kvcache.state import state_bytes
from sameseed.measure.passes import BLOCK_SIZE
from sameseed.measure.profiler import LOADING_BYTES
from sameseed.plan.outlook import DraftPlan
from sameseed.plan.paper import Sheet, sheet
from sameseed.tuned import TunedFigure

# Bytes of the interpreter with PyTorch 2.13 for CPUs, plans of passes included, and of a token in the tokenizer (0.22).
# tests/e2e/test_peak_memory.py holds estimates against processes, with vocabularies of 1,000, 49,000 and 152,000.
PROGRAM, TOKEN = 252 << 20, 900


@dataclass(frozen=True)
class Memory:
    """Memory in bytes."""

    available: int
    program: int  # interpreter and tokenizer, where these must fit in `available`, too
    weights: int
    draft_weights: int
    cache_per_token: int
    cache: int
    start: int  # of the process once it is loaded
    peak: TunedFigure  # with the cache full, in a pass
    max_context: Mapping[int, int]  # the longest text of each sequence, by number of sequences
    max_batch: int  # most sequences of the asked context


def memory(
    target: Sheet, drafts: Seq[DraftPlan], available: int, context: int, batches: Seq[int], is_free: bool = True
) -> Memory:
    """Memory of the target with the largest draft. `is_free`: `available` is free beside this process."""
    process = PROGRAM + TOKEN * target.config.vocab_size
    program = 0 if is_free else process
    draft_weights = max((d.weights for d in drafts), default=0)
    row = target.row + max((d.row for d in drafts), default=0)
    # Of a pass: rows of a prompt, and the logits of the largest draft.
    weights, scratch = target.weights + draft_weights, pass_bytes(target.config, MAX_NUM_ROWS, MAX_NODES + 1)
    room, state = available - program - weights - scratch, state_bytes(target.config.state_shapes)
    limit = target.config.max_model_len
    longest = {b: max(0, min(limit, (room // b - state) // row // BLOCK_SIZE * BLOCK_SIZE)) for b in batches}
    cache = batches[-1] * (context * row + state)
    start = process + weights
    passed = pass_bytes(target.config, min(MAX_NUM_ROWS, context), MAX_NODES + 1 if drafts else 1)
    passed += max((d.passing for d in drafts), default=0)
    middle, high = start + cache + passed // 2, start + max(LOADING_BYTES, cache + scratch)  # half exists at one time
    figure = TunedFigure(float(middle), float(start + cache), float(high), "paper")
    most = max(0, room // (row * -(-context // BLOCK_SIZE) * BLOCK_SIZE + state))
    return Memory(available, program, target.weights, draft_weights, row, cache, start, figure, longest, most)


def too_small(found: Memory, target: Sheet, model: str, kv_format: str, context: int) -> ConfigError:
    """The error where not one sequence of the asked context fits; its text says what would fit."""
    takes = found.program + found.weights + found.draft_weights + state_bytes(target.config.state_shapes)
    takes += pass_bytes(target.config, MAX_NUM_ROWS, MAX_NODES + 1)
    said = f"{target.name} takes {takes / GIB:.2f} GiB before any cache, a text of {context} tokens "
    said += f"{context * found.cache_per_token / GIB:.2f} GiB, and {found.available / GIB:.2f} GiB are there: "
    longest = max(found.max_context.values())
    remedies = [f"--context {longest}"] if longest else []
    for name in ("w8a8", "w4a8"):
        with suppress(ConfigError):  # the format's group size may not divide the rows
            other = sheet(model, name, kv_format)
            left = found.available - takes + target.weights - other.weights
            fits = min(other.config.max_model_len, left // found.cache_per_token // BLOCK_SIZE * BLOCK_SIZE)
            if other.weights < target.weights and fits > longest:
                remedies.append(f"--format {name} (then up to {fits} tokens; {other.loss or 'no loss'})")
    return ConfigError(said + (f"take {', or '.join(remedies)}" if remedies else "take a smaller model"))
