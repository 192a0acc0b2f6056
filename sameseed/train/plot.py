"""The loss curve of a run as a picture."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path


def read_losses(log: Path) -> dict[str, dict[int, float]]:
    """stage -> step -> loss from a run's JSON lines; where a step was repeated after an interruption, its last loss."""
    losses: dict[str, dict[int, float]] = defaultdict(dict)
    for line in log.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if "loss" in row:
            losses[row["stage"]][row["step"]] = row["loss"]
    return dict(losses)


def plot_losses(log: Path, path: Path) -> None:
    """One panel a stage: the loss of every step, and its running mean."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    losses = read_losses(log)
    figure, panels = pyplot.subplots(1, max(1, len(losses)), figsize=(5 * max(1, len(losses)), 3.5), squeeze=False)
    for panel, (stage, by_step) in zip(panels[0], losses.items(), strict=True):
        steps = sorted(by_step)
        mean, means = by_step[steps[0]], []
        for step in steps:
            mean = 0.95 * mean + 0.05 * by_step[step]
            means.append(mean)
        panel.plot(steps, [by_step[s] for s in steps], color="0.8", linewidth=0.6)
        panel.plot(steps, means, color="tab:blue")
        panel.set(title=stage, xlabel="step", ylabel="loss (nats a token)")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
