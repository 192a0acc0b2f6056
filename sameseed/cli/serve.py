"""`sameseed serve`: a model behind OpenAI's API, speculation inside."""

from __future__ import annotations

import importlib.util
import logging
import os
from dataclasses import fields
from pathlib import Path

from sameseed.cli.flags import ServeArgs, VllmFlags
from sameseed.cli.options import Parsed, companion
from sameseed.errors import ConfigError
from sameseed.server.config import Keys, ServerConfig, ServerFlags
from sameseed.tuned import Tuned

log = logging.getLogger("sameseed.server")


def run(parsed: Parsed[ServeArgs]) -> int:
    """Check, serve until told to stop."""
    args, engine = parsed.args, parsed.engine
    missing = [m for m in ("fastapi", "msgspec", "uvicorn", "prometheus_client") if importlib.util.find_spec(m) is None]
    if missing:
        raise ConfigError(f"the server needs {', '.join(missing)}; install it: pip install '.[server]'")
    from sameseed.server import logs
    from sameseed.server.run import serve

    logs.set_up(args.log_level)
    profile = engine.settings["profile"]
    limit = None if profile is None else Tuned.read(profile).chosen.max_num_seqs
    if limit == engine.settings["max_num_seqs"]:
        log.warning("at most %d requests run at once, as in the profile's tuning; --max-num-seqs N runs more", limit)
    folder = Path(os.path.expanduser(engine.model))  # clients must not see its path
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
        return int(companion("vllm").serve(args, engine, config))
    if any(getattr(args, f.name) != f.default for f in fields(VllmFlags)):
        raise ConfigError("several GPUs or nodes, --batch-invariant and --vllm-... need --engine vllm; give it")
    return serve(engine.model, engine.settings, config)
