"""`sameseed chat`: a conversation on the terminal, or from a pipe (one line per turn)."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace

from sameseed.cli.console import TextWriter, load_llm, stderr_console, summary
from sameseed.cli.flags import ChatArgs
from sameseed.cli.generate import as_json
from sameseed.cli.options import Parsed
from sameseed.engine.llm import LLM
from sameseed.errors import RequestError
from sameseed.models.harmony import Harmony, is_harmony
from sameseed.request import SamplingParams

HELP = "/reset forgets the conversation, /exit (or Ctrl-D) ends it, Ctrl-C stops an answer"


def run(parsed: Parsed[ChatArgs]) -> int:
    """Run turns to the end of the input. On a terminal, a turn that fails or is stopped does not change the history."""
    args = parsed.args
    llm = load_llm(parsed.engine.model, quiet=args.json, **parsed.engine.settings)
    params = replace(parsed.params, max_tokens=min(parsed.params.max_tokens, llm.engine.max_model_len))
    interactive, console = sys.stdin.isatty() and not args.json, stderr_console()
    if interactive:
        console.print(HELP, style="dim")
    opening = [{"role": "system", "content": args.system}] if args.system else []
    messages = opening
    for line in turns(interactive):
        if line in ("/exit", "/quit"):
            break
        if line == "/reset":
            messages = opening
        elif line.startswith("/") and " " not in line:
            console.print(HELP)
        else:
            asked = [*messages, {"role": "user", "content": line}]
            try:
                text = answer(llm, asked, params, args, interactive)
                messages = [*asked, {"role": "assistant", "content": text}]
            except (RequestError, KeyboardInterrupt) as error:
                if not interactive:
                    raise
                stopped = isinstance(error, KeyboardInterrupt)
                console.print("\ninterrupted" if stopped else f"error: {error} (/reset begins anew)", markup=False)
    return 0


def turns(interactive: bool) -> Iterator[str]:
    """Yields the non-empty input lines. Raises RequestError for input that is not UTF-8."""
    if interactive:
        import readline  # noqa: F401 - gives input() its line editing

    while True:
        try:
            line = input("you> ") if interactive else sys.stdin.readline()
        except EOFError:
            print()
            return
        except UnicodeDecodeError as error:
            raise RequestError(f"standard input is no UTF-8 text ({error}); convert it first") from None
        if not line and not interactive:
            return
        if line.strip():
            yield line.strip()


def answer(llm: LLM, messages: list[dict[str, str]], params: SamplingParams, args: ChatArgs, interactive: bool) -> str:
    """Generate an answer and show it meanwhile; returns its text, without the reasoning of Harmony."""
    writer = TextWriter(sys.stdout, args.show_draft)
    text, harmony = "", Harmony("") if is_harmony(llm.tokenizer.chat_template) else None
    params = params if harmony is None else replace(params, skip_special_tokens=False)
    try:
        for delta in llm.chat_stream(messages, params):
            thought, said = harmony.feed(delta.text, delta.completion is not None) if harmony else ("", delta.text)
            gap = "\n\n" if said and not text and writer.text else ""
            text += said
            if not args.json:  # drafts are marked in the text as generated
                writer.write(delta if args.show_draft else replace(delta, text=thought + gap + said))
            if delta.completion is not None:
                if delta.completion.error and not args.json:
                    stderr_console().print(f"error: {delta.completion.error}", soft_wrap=True, markup=False)
                if args.json:
                    print(json.dumps({"role": "assistant"} | as_json(delta.completion) | {"text": text}), flush=True)
                else:
                    print(flush=True)
                    if interactive:
                        stderr_console().print(summary(delta.completion.metrics), style="dim", soft_wrap=True)
    finally:
        if not args.json:
            writer.end()
    return text
