"""`sameseed train`: train a tokenizer, a target model and a draft distilled from the target, as a recipe describes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sameseed.errors import ConfigError

__all__ = ["TrainResult", "run"]


@dataclass(frozen=True)
class TrainResult:
    """The folders of the trained pair, and its measurements (also in `out/results.json`)."""

    target: Path
    draft: Path
    loss_plot: Path
    results: dict[str, Any]


def run(
    config: Path, *, data: Path, out: Path, device: str = "cpu", resume: bool = False, quiet: bool = False
) -> TrainResult:
    """Train the pair of a recipe into `out/target` and `out/draft`, with the models on `device`.

    With `resume`, finished stages are skipped and the unfinished one continues from its last checkpoint. Raises
    ConfigError for a bad recipe, a missing device, a missing or damaged data folder, or a non-empty `out` without
    `resume`.
    """
    from sameseed import devices
    from sameseed_train.recipe import load_recipe

    devices.check(device)
    recipe = load_recipe(config)
    if not data.is_dir():
        raise ConfigError(f"no data folder at {data}; give the folder that holds {recipe.valid_file} with --data")
    if out.exists() and any(out.iterdir()) and not resume:
        raise ConfigError(f"{out} is not empty; add --resume to go on, or choose another folder with --out")
    import torch

    from sameseed_train.pipeline import run_stages

    threads = torch.get_num_threads()
    torch.set_flush_denormal(True)
    torch.set_num_threads(recipe.threads or threads)
    try:
        results = run_stages(recipe, config, data, out, device, quiet=quiet)
    finally:
        torch.set_num_threads(threads)
        torch.set_flush_denormal(False)
    return TrainResult(out / "target", out / "draft", out / "loss.png", results)
