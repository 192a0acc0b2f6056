"""Run by a Python that has vLLM: reads command lines as JSON from standard input and prints how vLLM parses them.

Each command line is [words, whole]. If `whole`, vLLM's whole configuration is built; else only that of the target and
the draft, because this build of vLLM (for CPUs) does not run the rest. Prints the parser's flags first, then one line
of JSON per command line: {"made": {...}} or {"error": "..."}.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def parser() -> Any:
    """The parser of `vllm serve`."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    try:
        from vllm.entrypoints.common.cli_args import make_arg_parser  # from 0.33 on
    except ImportError:
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
    return make_arg_parser(FlexibleArgumentParser(exit_on_error=False))


def told(words: list[str], whole: bool, takes: Any) -> dict[str, Any]:
    from vllm.config import ParallelConfig
    from vllm.engine.arg_utils import AsyncEngineArgs

    args = AsyncEngineArgs.from_cli_args(takes.parse_args(["--model", *words]))
    if whole:
        config = args.create_engine_config()
        spec, cache = config.speculative_config, config.cache_config
        parallel = config.parallel_config
        made = {"cache": str(cache.cache_dtype), "prefix": cache.enable_prefix_caching, "block": cache.block_size}
        made |= {"tp": parallel.tensor_parallel_size, "pp": parallel.pipeline_parallel_size}
        made |= {"executor": str(parallel.distributed_executor_backend)}
        made |= {"names": args.served_model_name, "seqs": config.scheduler_config.max_num_seqs}
    else:
        parallel = ParallelConfig(tensor_parallel_size=args.tensor_parallel_size)
        spec, made = args.create_speculative_config(args.create_model_config(), parallel), {}
    if spec is not None:
        own = ("method", "num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max", "parallel_drafting")
        own += ("draft_tensor_parallel_size", "draft_sample_method", "num_speculative_tokens_per_batch_size")
        own += ("suffix_decoding_max_cached_requests",)
        made["spec"] = {name: getattr(spec, name) for name in own}
    return made


def main() -> None:
    from vllm.platforms import current_platform

    takes = parser()
    about = {"flags": sorted(takes._option_string_actions), "ray": bool(current_platform.ray_device_key)}
    print(json.dumps(about), flush=True)
    for words, whole in json.load(sys.stdin):
        try:
            line = {"made": told(words, whole, takes)}
        except (Exception, SystemExit) as error:
            line = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
