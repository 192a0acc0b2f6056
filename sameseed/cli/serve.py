"""`sameseed serve`: a model behind OpenAI's API, speculation inside."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence as Seq
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal

from sameseed.cli.options import companion, option, parse
from sameseed.errors import ConfigError
from sameseed.server.config import ServerFlags


@dataclass(frozen=True)
class VllmFlags:
    """Flags of `--engine vllm` alone."""

    vllm_python: Annotated[str | None, option("PYTHON")] = None  # python that has vLLM; unset: this one
    vllm_args: Annotated[str, option("FLAGS")] = ""  # vLLM's own flags, e.g. --vllm-args='--enforce-eager'
    tensor_parallel_size: int = 1  # vllm: GPUs that share each layer
    pipeline_parallel_size: Annotated[int | None, option("N")] = None  # vllm: groups of layers; unset: one per node
    nodes: int = 1  # vllm: nodes of a Ray cluster, which must be running
    batch_invariant: bool = False  # vllm: texts do not depend on the batch; slower, only on GPUs


@dataclass(frozen=True)
class ServeArgs(VllmFlags, ServerFlags):
    """Serve a model over HTTP with OpenAI's API. Only this machine can reach it, unless there is an API key."""

    served_model_name: Annotated[tuple[str, ...], option("NAME")] = ()  # the model's names; answers show the first
    api_key_file: Annotated[Path | None, option("FILE")] = None  # keys, one per line (or SAMESEED_API_KEY, with commas)
    allowed_host: Annotated[tuple[str, ...], option("NAME")] = ()  # more host names of this machine
    log_level: Literal["debug", "info", "warning", "error"] = "info"  # least level of the JSON log lines on stderr
    per_request_spec_decode_metrics: Literal["summary", "detailed"] = "summary"  # detailed: list every round
    engine: Literal["sameseed", "vllm"] = "sameseed"  # vllm: start vLLM with the same flags, as its proxy


def run(argv: Seq[str], prog: str) -> int:
    """Parse, check, serve until told to stop."""
    parsed = parse(ServeArgs, argv, prog, engine=True)
    args, engine = parsed.args, parsed.engine
    missing = [m for m in ("fastapi", "msgspec", "uvicorn", "prometheus_client") if importlib.util.find_spec(m) is None]
    if missing:
        raise ConfigError(f"the server needs {', '.join(missing)}; install it: pip install '.[server]'")
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
    if args.engine == "vllm":
        code: int = companion("vllm").serve(args, engine, config)
        return code
    given = [f.name for f in fields(VllmFlags) if getattr(args, f.name) != f.default]
    if given:
        raise ConfigError(
            "several GPUs or nodes, --batch-invariant and --vllm-... flags are for --engine vllm; give that, "
            "or leave them"
        )
    return serve(engine.model, engine.settings, config)
