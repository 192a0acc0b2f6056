"""`sameseed twin-demo`: the demo at a real model's size, with a twin of the packaged pair in memory."""

from __future__ import annotations

import json
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from sameseed.cli.options import parse
from sameseed.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from sameseed.engine.engine import Engine


@dataclass(frozen=True)
class TwinDemoArgs:
    """Watch the packaged pair's drafts being accepted, then measure speculation off and on at a real model's size.

    The model is a twin: a model's shape in memory, with made-up weights that compute the packaged pair.
    """

    shape: str = "llama-3.2-1b"  # the twin's shape, see profile --list
    format: str = "w4a8"  # number format of the twin's weights
    seconds: float = 40.0  # time to aim at for measuring


def run(argv: Seq[str], prog: str) -> int:
    """Show, measure, conclude; exit code 1 if an output differed."""
    args = parse(TwinDemoArgs, argv, prog).args
    if args.seconds <= 0:
        raise ConfigError(f"--seconds must be above 0, got {args.seconds:g}")
    from sameseed import demo
    from sameseed.cli.console import stdout_console
    from sameseed_lab.twin import find_shape, open_head_twin

    with open_head_twin(find_shape(args.shape), demo.HEAD, demo.TARGET, args.shape):
        pass  # a mistyped or too small shape fails before anything is shown
    console = stdout_console()
    _, _, same = demo.show_pair(console)
    plain, drafting = open_twins(args, console)
    same = demo.measure(plain, drafting, demo.pair_prompts(plain.tokenizer), args.seconds, console) and same
    return 0 if same else 1


def open_twins(args: TwinDemoArgs, console: Console) -> tuple[Engine, Engine]:
    """Make two engines that share weights, without and with a draft head, and print what they are.

    Raises ConfigError if memory is short.
    """
    from sameseed.cli.console import weights_progress
    from sameseed.demo import CHAIN, HEAD, TARGET
    from sameseed.engine.build import assemble
    from sameseed.engine.settings import make_config
    from sameseed.measure.workload import ASSETS
    from sameseed_lab.twin import find_shape
    from sameseed_lab.twin.loaded import load_twins

    settings: dict[str, Any] = {"format": args.format, "max_model_len": 512, "max_num_seqs": 1, "prefix_cache": False}
    config = make_config(HEAD, draft_options=CHAIN, **settings)
    built = json.loads((ASSETS / "head" / "results.json").read_text())["acceptance"]["all"]["rate"]
    with weights_progress(f"making {args.shape}") as report:
        twins = load_twins(find_shape(args.shape), TARGET, HEAD, config, name=args.shape, progress=report)
    console.print(f"The same at real size, in the shape of {args.shape}", style="bold")
    console.print(
        f"{twins.target.config.num_parameters / 1e9:.2f} billion weights in {args.format}, in memory. They are made "
        "up: this is the speed of that shape, not its output. They compute the small model above, so its drafts are "
        f"accepted as often: {built:.0%} of four in a row, on prompts that it was not trained on. A pair of trained "
        "models has a rate of its own."
    )
    none = replace(twins.config, spec=make_config(None).spec)
    plain = assemble(none, twins.tokenizer, twins.num_blocks, twins.target)
    return plain, assemble(twins.config, twins.tokenizer, twins.num_blocks, plain.runner, twins.drafts)
