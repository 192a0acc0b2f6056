"""Run by a Python that has vLLM: starts the workers of another node, as `vllm serve --headless ARGUMENT...` does.

The command itself does not start with vLLM's build for CPUs, because it looks for a package of another name.
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
