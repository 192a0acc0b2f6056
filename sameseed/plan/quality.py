"""Quality of number formats: perplexity over that of the checkpoint's own weights, on a small text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence as Seq
from functools import partial
from typing import Any

from sameseed.errors import ConfigError
from sameseed.measure.quality.perplexity import Perplexity, perplexity, ratio
from sameseed.measure.workload import ASSETS, read_prompts
from sameseed.plan.candidates import TargetBench, Tell
from sameseed.plan.grid import TuneRequest
from sameseed.tuned import Loser, TunedFigure

WINDOW, STRIDE = 256, 128  # short, so that a few thousand tokens give many windows to resample
HELD_OUT = (ASSETS / "prompts_heldout.jsonl", ASSETS / "prompts.jsonl")
Ratios = dict[tuple[str, str], TunedFigure]  # by formats of weights and cache; intervals hold 95 %


def measure(asked: TuneRequest, targets: Seq[TargetBench], load: Callable[..., Any], tell: Tell) -> Ratios:
    """The ratio of each target to the checkpoint, which is loaded where it is not among them. Raises ConfigError."""
    text = asked.quality_text or "\n\n".join(p.said for file in HELD_OUT for p in read_prompts(file))

    def of(llm: Any, name: str) -> Perplexity:
        return perplexity(llm, text, WINDOW, STRIDE, asked.quality_tokens, partial(tell, f"quality: {name}"))

    tell("quality: auto", 0, 1)
    own = next((t.bench.llm for t in targets if (t.format, t.kv_format) == ("auto", "auto")), None)
    base = of(own or load(asked.model, None, **{**asked.settings, "max_num_seqs": 1}), "auto")
    found: Ratios = {}
    for target in targets:
        mine = base if target.bench.llm is own else of(target.bench.llm, target.name)
        value, interval = ratio(mine, base, asked.params.seed or 0)
        if interval is None:
            raise ConfigError(
                f"a text of {base.tokens} tokens tells nothing of quality; give --quality-text a longer one"
            )
        found[target.format, target.kv_format] = TunedFigure(
            value, *(interval if math.isfinite(value) else (value, value))
        )
    return found


def kept(asked: TuneRequest, targets: Seq[TargetBench], found: Ratios, lost: list[Loser]) -> list[TargetBench]:
    """The targets whose interval does not lie above the bound; `lost` names the others. Raises ConfigError."""
    bound, made = asked.quality, []
    for target in targets:
        its = found.get((target.format, target.kv_format))
        if its is None or its.low <= bound:
            made.append(target)
            continue
        note = f"perplexity {its.value:.4f} ({its.low:.4f} to {its.high:.4f}) times the checkpoint's, above {bound:g}"
        lost.append(Loser({"setting": target.name}, "quality", note=note))
    if not made:
        said = "; ".join(f"{x.settings['setting']}: {x.note}" for x in lost if x.why == "quality")
        raise ConfigError(f"no format keeps --quality {bound:g} ({said}); raise it, or add auto to --formats")
    return made
