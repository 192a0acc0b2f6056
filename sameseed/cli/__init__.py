"""The `sameseed` command: `flags` has the flags of each subcommand, and a module of this package its `run(parsed)`.

A subcommand's module is imported once its flags are understood, so that help and bad usage are answered at once.
Companions, and any other installed package, add subcommands by entry points of the group `sameseed.commands`: each
names a module with `run(argv, prog)`.

An error that the user can fix is one line on stderr and exit code 2. Ctrl-C gives exit code 130, and so does SIGTERM
(but `serve` finishes its requests). A closed output pipe (`| head`) gives exit code 141 and no message.
"""

from __future__ import annotations

import errno
import gc
import importlib
import io
import os
import shutil
import signal
import sys
import textwrap
import threading
from collections.abc import Sequence as Seq

from sameseed import __version__, memory, registry
from sameseed.errors import RegistryError, SameseedError, nearest

COMMANDS = {
    "generate": "continue a prompt, with the text streaming as it is written",
    "chat": "talk with a model, turn by turn",
    "serve": "a model behind OpenAI's API over HTTP, speculation inside",
    "bench": "measure speculative against plain decoding; one JSON line a measurement",
    "eval": "measure perplexity and tasks; compare formats in quality, speed and acceptance",
    "verify-lossless": "prove that speculation changes nothing: tokens, sampling, cache; an HTML certificate",
    "verify-server": "check that a server returns the same text for the same request, under load and over time",
    "profile": "measure what a pass over M rows costs in each number format, and this machine's limits",
    "estimate": "memory and speed of a model, plain and with drafts, before its weights are downloaded",
    "tune": "find the draft, formats and lengths that are fastest here, and write them to a file",
    "regret": "how far the choice of tune is behind the best setting of its whole grid",
    "doctor": "why speculation does not pay: on a server of sameseed, vLLM or llama.cpp, and what to set",
    "export": "a tuned profile as the command line of vLLM, SGLang or llama.cpp",
    "quantize": "store a model's weights in fewer bits, by a method, as a checkpoint",
    "train": "make a pair by a recipe, or a draft head (train head) or a draft (train draft) for any target",
    "study": "a published study by one command: its grid measured here, their figures beside ours",
    "twin": "a checkpoint of a real model's shape that computes a small model's function",
    "vocabulary": "a list of frequent tokens, for drafts from these only",
    "info": "this machine, its backends, formats, drafters and the embedded models",
    "completion": "what makes bash or zsh complete commands and flags: source <(sameseed completion)",
    "demo": "watch drafts being accepted, and what they bring",
}
COMPANIONS = {  # commands, and the package that has each
    **dict.fromkeys(("train", "vocabulary"), "sameseed-train"),
    **dict.fromkeys(("regret", "study", "twin"), "sameseed-lab"),
    "export": "sameseed-vllm",
    "verify-server": "sameseed-verify",
}
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141
LOADING = ("generate", "chat", "bench")  # commands that load the model in this process, and first
NEEDED = ("tyro", "rich")  # packages that only the command line needs
REMEDIES = {  # by the number of an OSError
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "; make room and run again"),
    errno.EBADF: ": standard output is closed; send it to a file or a pipe",
}


def main(argv: Seq[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    for number, stream in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, stream) is None:  # it was closed: another file would take its number
            os.dup2(os.open(os.devnull, os.O_RDONLY if stream == "stdout" else os.O_RDWR), number)  # no result is lost
            setattr(sys, stream, open(number, "w" if number else "r"))  # noqa: SIM115 - it stays open
    argv = list(sys.argv[1:] if argv is None else argv)
    gc.set_threshold(20_000, 20, 100)  # imports make a million objects that stay: fewer searches for garbage among them
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # do not fail on a character that the terminal cannot show
    # SIGTERM raises KeyboardInterrupt, too, so that measurements are kept and servers are ended.
    terminates = (
        threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    )
    if terminates:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        code = _command(argv[0] if argv else "", argv[1:])
        sys.stdout.flush()
        return code
    except SameseedError as error:
        _settle()
        why = str(error)
    except (ImportError, MemoryError) as error:
        if (name := getattr(error, "name", None)) in NEEDED:  # in a checkout that pip did not install
            why = f"the command line needs {name}, which is not installed: `pip install {name}`, or use "
            why += "`from sameseed import LLM`, which does without"
        elif isinstance(error, MemoryError) or "failed to map" in str(error):
            why = f"memory ran out ({error or 'Python'}); end other programs, or allow more memory (ulimit -v)"
        else:
            raise
    except KeyboardInterrupt:
        _settle()
        if sys.stdout.isatty():
            print()  # keep what was written or typed on its own line
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        _drop_output()
        return EXIT_BROKEN_PIPE
    except OSError as error:  # usually a full disk
        _settle()
        where = f" {error.filename}" if error.filename else ""
        why = f"{error.strerror or error}{where}{REMEDIES.get(error.errno or 0, '')}"
    finally:
        if terminates:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        gc.freeze()  # the interpreter, as it ends, need not search what is left: 0.4 s with PyTorch
    print(f"error: {why}", file=sys.stderr)
    return EXIT_USAGE


def overview() -> str:
    """The text of `sameseed --help`."""
    installed = registry.names("commands")
    missing = {name: f"{COMMANDS[name]} (pip install {p})" for name, p in COMPANIONS.items() if name not in installed}
    commands = {**COMMANDS, **missing, **{name: "from another package" for name in installed if name not in COMMANDS}}
    width = shutil.get_terminal_size((200, 24)).columns
    lines = [textwrap.fill(f"  {n:<17}{text}", width, subsequent_indent=" " * 19) for n, text in commands.items()]
    what = textwrap.fill("Speculative decoding that never changes the output: draft cheaply, verify exactly.", width)
    more = textwrap.fill("`sameseed COMMAND --help` lists a command's options. To begin: sameseed demo", width)
    return "\n".join(["usage: sameseed COMMAND [OPTIONS]", "", what, "", *lines, "", more])


def _command(name: str, argv: list[str]) -> int:
    """Run a command. Raises RegistryError for an unknown one, and for one whose package is not installed."""
    if name in ("", "-h", "--help", "help"):
        print(overview())
        return 0 if name else EXIT_USAGE
    if name in ("-V", "--version"):
        print(f"sameseed {__version__}")
        return 0
    installed = registry.names("commands")
    if name in installed:
        return int(registry.load("commands", name).run(argv, f"sameseed {name}"))
    if name in COMPANIONS:
        raise RegistryError(f"`sameseed {name}` is part of {COMPANIONS[name]}: pip install {COMPANIONS[name]}")
    known = sorted({*COMMANDS, *installed})
    if name not in known:
        raise RegistryError(f"no command {name!r}{nearest(name, known)} (there are: {', '.join(known)})")
    if name == "bench" and argv[:1] == ["serve"]:
        name, argv = "bench serve", argv[1:]
    flags, options = (importlib.import_module(f"sameseed.cli.{part}") for part in ("flags", "options"))
    words = name.replace("-", " ").split()
    own = getattr(flags, f"{''.join(map(str.title, words))}Args")
    parsed = options.parse(own, argv, f"sameseed {name}", **flags.SHARED.get(name, {}))
    if name in LOADING and parsed.engine.settings.get("device") == "cpu":
        memory.bring_in(parsed.engine.model)
    return int(importlib.import_module(f"sameseed.cli.{'_'.join(words)}").run(parsed))


def _settle() -> None:
    """Restore the terminal: default colours, a visible cursor."""
    try:
        if sys.stdout.isatty():
            sys.stdout.write("\x1b[0m\x1b[?25h")
        sys.stdout.flush()
    except OSError:
        _drop_output()


def _drop_output() -> None:
    """Send stdout to /dev/null once it cannot be written, so that the flush at the interpreter's exit does not fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
