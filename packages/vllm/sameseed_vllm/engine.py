"""vLLM as the engine of `sameseed serve` and `sameseed tune`: the entry point of the group `sameseed.engines`."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from sameseed.errors import ConfigError
from sameseed_vllm import flags as vllm
from sameseed_vllm.draft import OWN as OWN, Spread, speculative_config
from sameseed_vllm.environments import environment, look

if TYPE_CHECKING:
    from sameseed.cli.flags import ServeArgs, TuneArgs
    from sameseed.cli.options import EngineChoice
    from sameseed.server.config import Keys, ServerConfig

log = logging.getLogger("sameseed.server")


def serve(args: ServeArgs, engine: EngineChoice, config: ServerConfig) -> int:
    """Serve with vLLM until told to stop; returns the exit code. Raises ConfigError, ModelLoadError."""
    spread = Spread(args.tensor_parallel_size, args.pipeline_parallel_size, args.nodes)
    spec = speculative_config(engine.settings, spread)

    def check(keys: Keys) -> None:
        if vllm.shares_past(spec) and len(keys) > 1:
            raise ConfigError("API keys would share past texts; leave out past, suffix_decoding_max_cached_requests")

    config.keys.restrict(check)
    detail, more, parser = args.per_request_spec_decode_metrics, args.vllm_args, config.reasoning_parser
    arguments = vllm.arguments(engine.model, engine.settings, spread, config.names, detail, more, parser)
    installed = look(args.vllm_python)
    vllm.check(installed, arguments, spec, spread, args.batch_invariant)
    facts = {"max_num_seqs": engine.settings["max_num_seqs"], "method": spec["method"] if spec else "none"}
    facts["greedy_only"] = vllm.greedy_only(installed, spec)
    for note in vllm.notes(installed, spec, args.batch_invariant):
        log.warning(note)
    try:
        from sameseed.server.run import Runner
        from sameseed_vllm.client import VllmClient
        from sameseed_vllm.proxy import create_proxy
    except ImportError as error:
        raise ConfigError(f"--engine vllm needs {error.name}; install it: pip install 'sameseed[server]'") from None

    variables = environment(engine.settings, spread, args.batch_invariant)
    python, timeout = args.vllm_python, config.load_timeout
    client = VllmClient(arguments, facts, python=python, environment=variables, load_timeout=timeout)
    return asyncio.run(Runner(client, *create_proxy(client, config), config).run())


def tune(args: TuneArgs) -> int:
    """Find which draft length pays in a running vLLM; returns the exit code. Raises ConfigError."""
    from sameseed_vllm import tune_server

    return tune_server.tune(args)
