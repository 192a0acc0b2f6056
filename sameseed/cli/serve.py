"""`sameseed serve`: a model behind OpenAI's API, speculation inside."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence as Seq
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from sameseed.cli.options import EngineChoice, option, parse
from sameseed.errors import ConfigError
from sameseed.server.config import ServerFlags

if TYPE_CHECKING:
    from sameseed.export.vllm import Spread
    from sameseed.server.config import Keys, ServerConfig


@dataclass(frozen=True)
class ServeArgs(ServerFlags):
    """Serve a model over HTTP with OpenAI's API. Only this machine can reach it, unless there is an API key."""

    served_model_name: Annotated[tuple[str, ...], option("NAME")] = ()  # the model's names; answers show the first
    api_key_file: Annotated[Path | None, option("FILE")] = None  # keys, one per line (or SAMESEED_API_KEY, with commas)
    allowed_host: Annotated[tuple[str, ...], option("NAME")] = ()  # more host names of this machine
    log_level: Literal["debug", "info", "warning", "error"] = "info"  # least level of the JSON log lines on stderr
    per_request_spec_decode_metrics: Literal["summary", "detailed"] = "summary"  # detailed: list every round
    engine: Literal["sameseed", "vllm"] = "sameseed"  # vllm: start vLLM with the same flags, as its proxy
    vllm_python: Annotated[str | None, option("PYTHON")] = None  # python that has vLLM; unset: this one
    vllm_args: Annotated[str, option("FLAGS")] = ""  # vLLM's own flags, e.g. --vllm-args='--enforce-eager'
    tensor_parallel_size: int = 1  # vllm: GPUs that share each layer
    pipeline_parallel_size: Annotated[int | None, option("N")] = None  # vllm: groups of layers; unset: one per node
    replicas: int = 1  # vllm: how many on this machine; a request goes where its prefix was computed before
    nodes: int = 1  # vllm: nodes of a Ray cluster, which must be running
    batch_invariant: bool = False  # vllm: texts do not depend on the batch; slower, only on GPUs


def run(argv: Seq[str], prog: str) -> int:
    """Parse, check, serve until told to stop."""
    parsed = parse(ServeArgs, argv, prog, engine=True)
    args, engine = parsed.args, parsed.engine
    missing = [m for m in ("fastapi", "msgspec", "uvicorn", "prometheus_client") if importlib.util.find_spec(m) is None]
    if missing:
        raise ConfigError(f"the server needs {', '.join(missing)}; install it: pip install '.[server]'")
    from sameseed.export.vllm import Spread
    from sameseed.server import logs
    from sameseed.server.config import Keys, ServerConfig
    from sameseed.server.run import serve

    logs.set_up(args.log_level)
    folder = Path(engine.model).expanduser()  # clients must not see its path
    name, *aliases = args.served_model_name or ((folder.resolve().name if folder.exists() else engine.model),)
    config = ServerConfig(
        **{f.name: getattr(args, f.name) for f in fields(ServerFlags)},
        model_name=name,
        aliases=tuple(aliases),
        keys=Keys.read(args.api_key_file),
        allowed_hosts=args.allowed_host,
        detailed=args.per_request_spec_decode_metrics == "detailed",
    )
    spread = Spread(args.tensor_parallel_size, args.pipeline_parallel_size, args.nodes)
    if args.engine == "vllm":
        return _serve_vllm(args, engine, spread, config)
    theirs = spread != Spread() or args.replicas != 1
    if theirs or args.vllm_python is not None or args.vllm_args or args.batch_invariant:
        raise ConfigError(
            "several GPUs, nodes or replicas, --batch-invariant and --vllm-... flags are for --engine vllm; give that, "
            "or leave them"
        )
    return serve(engine.model, engine.settings, config)


def _serve_vllm(args: ServeArgs, engine: EngineChoice, spread: Spread, config: ServerConfig) -> int:
    """Serve with vLLM, with the same flags translated. Raises ConfigError, ModelLoadError for what vLLM cannot do."""
    from sameseed.export import vllm
    from sameseed.export.vllm_installed import look
    from sameseed.export.vllm_replicas import environments
    from sameseed.server.run import serve_vllm

    spec = vllm.speculative_config(engine.settings, spread)

    def check(keys: Keys) -> None:
        if vllm.shares_past(spec) and len(keys) > 1:
            raise ConfigError(
                "vLLM keeps one store of past texts, and there are several API keys: one's texts would be drafted for "
                "another; leave past and suffix_decoding_max_cached_requests out"
            )
        if keys.count_tokens:
            raise ConfigError(
                "tokens_per_minute of an API key needs sameseed's own engine, which counts them; leave it"
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
    return serve_vllm(
        arguments,
        facts,
        config,
        python=args.vllm_python,
        environments=environments(engine.settings, spread, installed, args.replicas, args.batch_invariant),
        notes=vllm.notes(installed, spec, args.batch_invariant),
    )
