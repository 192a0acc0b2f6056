"""Run by a python that has vLLM: the workers of another node, as `vllm serve --headless ARGUMENT...` starts them.

vLLM's build for CPUs goes by another name than its command looks for, so that the command does not start there.
"""

from __future__ import annotations

import sys

from parse_with_vllm import parser


def main() -> None:
    from vllm.entrypoints.cli.serve import run_headless

    args = parser().parse_args(["--headless", "--model", *sys.argv[1:]])
    args.api_server_count = 0
    run_headless(args)


if __name__ == "__main__":
    main()
