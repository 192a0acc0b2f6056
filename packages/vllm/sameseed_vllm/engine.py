"""vLLM as the engine of `sameseed serve` and `sameseed tune`: the entry point of the group `sameseed.engines`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence as Seq
from typing import TYPE_CHECKING, Any

from sameseed.errors import ConfigError
from sameseed_vllm import flags as vllm
from sameseed_vllm.commands.tune import tune as tune
from sameseed_vllm.draft import OWN as OWN
from sameseed_vllm.environments import environment, look
from sameseed_vllm.flags import Spread

if TYPE_CHECKING:
    from sameseed.cli.flags import ServeArgs
    from sameseed.cli.options import EngineChoice
    from sameseed.server.config import Keys, ServerConfig
    from sameseed.server.run import OnFailure, Served

log = logging.getLogger("sameseed.server")


def serve(args: ServeArgs, engine: EngineChoice, config: ServerConfig) -> int:
    """Serve with vLLM, with the same flags translated. Raises ConfigError, ModelLoadError for what vLLM cannot do."""
    spread = Spread(args.tensor_parallel_size, args.pipeline_parallel_size, args.nodes)

    spec = vllm.speculative_config(engine.settings, spread)

    def check(keys: Keys) -> None:
        if vllm.shares_past(spec) and len(keys) > 1:
            raise ConfigError(
                "vLLM keeps one store of past texts, and there are several API keys: one's texts would be drafted for "
                "another; leave past and suffix_decoding_max_cached_requests out"
            )

    config.keys.restrict(check)
    facts: dict[str, object] = {
        "max_num_seqs": engine.settings["max_num_seqs"],
        "method": "none" if spec is None else spec["method"],
    }
    detail, more = args.per_request_spec_decode_metrics, args.vllm_args
    arguments = vllm.arguments(engine.model, engine.settings, spread, config.names, detail, more)
    installed = look(args.vllm_python)
    facts["greedy_only"] = vllm.greedy_only(installed, spec)
    vllm.check(installed, arguments, spec, spread, args.batch_invariant)
    return run(
        arguments,
        facts,
        config,
        python=args.vllm_python,
        environment=environment(engine.settings, spread, args.batch_invariant),
        notes=vllm.notes(installed, spec, args.batch_invariant),
    )


def run(
    arguments: Seq[str],
    facts: Mapping[str, Any],
    config: ServerConfig,
    *,
    python: str | None = None,
    environment: Mapping[str, str] | None = None,
    notes: Seq[str] = (),
) -> int:
    """Serve with vLLM as the engine until told to stop. For `arguments`, `facts` and `python` see `VllmClient`.

    `environment`: further variables of its process. `notes`: warnings to the operator, for the log.
    """
    for note in notes:
        log.warning(note)
    try:
        from sameseed.server.run import Runner, Served
        from sameseed_vllm.client import VllmClient
        from sameseed_vllm.proxy import create_proxy
    except ImportError as error:
        raise ConfigError(f"--engine vllm needs {error.name}; install it: pip install 'sameseed[server]'") from None

    def theirs(on_failure: OnFailure) -> Served:
        more: dict[str, Any] = {"load_timeout": config.load_timeout, "on_failure": on_failure}
        client = VllmClient(arguments, facts, python=python, environment=environment, **more)
        return Served(client, *create_proxy(client, config))

    return asyncio.run(Runner(theirs, config).run())
