"""What rounding to a format by `--format` costs in quality, as measured on real models: an estimate for other models.

Perplexity of WikiText-2 over that of the weights as stored, head in 8 bits or more (`QuantScheme.with_head`). A test
derives the figures from benchmarks/results/eval.jsonl; docs/guides/quality.md has them with intervals.
"""

from __future__ import annotations

from sameseed.scheme import QuantScheme, get

MODELS = {"SmolLM2-135M": 135, "qwen2.5-coder-1.5b": 1500}  # and their millions of parameters
LOSSES = {  # by model, in the order of MODELS
    "w8a8": (1.03, 1.01),
    "fp8": (1.03, 1.01),
    "w4a8": (1.48, 1.09),
    "w4a16-g64": (1.46, 1.08),
    "w4a16-g64-asym": (1.24,),
    "nf4": (1.18, 1.04),
}


def likely(quant: QuantScheme) -> str:
    """The likely loss in words, from the measured format of as many bits that is most like `quant`."""
    known = {QuantScheme.parse(name): loss for name, loss in LOSSES.items()}
    alike = [other for other in known if quant.weights != "auto" and get(other.weights).bits == get(quant.weights).bits]
    if not alike:
        return "a loss that was not measured"

    def kind(of: QuantScheme) -> tuple[object, ...]:
        return of.weights, of.activations, of.symmetric, of.group

    near = min(alike, key=lambda other: [a != b for a, b in zip(kind(other), kind(quant), strict=True)])
    losses = zip(known[near], MODELS.values(), strict=False)  # the larger model may not have been measured
    found = " or ".join(f"{loss:.2f} times the original's on a model of {size}M" for loss, size in losses)
    return f"perplexity about {found} (measured in {near.name})"
