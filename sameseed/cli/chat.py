"""`sameseed chat`: a conversation on the terminal, or turn by turn from a pipe (one line a turn)."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from sameseed.cli.options import option, parse
from sameseed.errors import RequestError
from sameseed.request import SamplingParams

if TYPE_CHECKING:
    from sameseed.engine.llm import LLM

HELP = "/reset forgets the conversation, /exit (or Ctrl-D) ends it, Ctrl-C stops an answer"


@dataclass(frozen=True)
class ChatArgs:
    """Talk with a model. On a terminal it asks and answers; from a pipe each line is a turn."""

    system: Annotated[str | None, option("TEXT")] = None  # a system message before the conversation
    show_draft: Annotated[bool, option()] = False  # mark the accepted draft tokens in the answers
    json: Annotated[bool, option()] = False  # one JSON line an answer instead of text


def run(argv: Seq[str], prog: str) -> int:
    """Parse, load, talk."""
    parsed = parse(ChatArgs, argv, prog, engine=True, sampling=True, defaults={"max_tokens": 256}, left_out=["n"])
    from sameseed.cli.console import load_llm

    llm = load_llm(parsed.engine, quiet=parsed.args.json)
    return Conversation(llm, parsed.params, parsed.args).talk()


class Conversation:
    """The messages so far, and how the next answer is shown."""

    def __init__(self, llm: LLM, params: SamplingParams, args: ChatArgs) -> None:
        self.llm, self.params, self.args = llm, params, args
        self.interactive = sys.stdin.isatty() and not args.json
        self.messages: list[dict[str, str]] = []
        self.reset()

    def reset(self) -> None:
        """Back to the system message."""
        self.messages = [{"role": "system", "content": self.args.system}] if self.args.system else []

    def talk(self) -> int:
        """Turn after turn, to the end of the input."""
        from sameseed.cli.console import stderr_console

        console = stderr_console()
        if self.interactive:
            console.print(HELP, style="dim")
        for line in self._turns():
            if line in ("/exit", "/quit"):
                break
            if line == "/reset":
                self.reset()
            elif line.startswith("/"):
                console.print(HELP)
            else:
                self._turn(line)
        return 0

    def _turns(self) -> Iterator[str]:
        """The lines that hold something."""
        if self.interactive:
            import readline  # noqa: F401 - gives input() its line editing

        while True:
            try:
                line = input("you> ") if self.interactive else sys.stdin.readline()
            except EOFError:
                print()
                return
            except UnicodeDecodeError as error:
                raise RequestError(f"standard input is no UTF-8 text ({error}); convert it first") from None
            if not line and not self.interactive:
                return
            if line.strip():
                yield line.strip()

    def _turn(self, line: str) -> None:
        """One question and its answer; what fails or is stopped on a terminal leaves the conversation as it was."""
        from sameseed.cli.console import stderr_console

        self.messages.append({"role": "user", "content": line})
        try:
            answer = self._answer()
        except RequestError as error:
            del self.messages[-1]
            if not self.interactive:
                raise
            stderr_console().print(f"error: {error} (/reset begins anew)", markup=False)
        except KeyboardInterrupt:
            del self.messages[-1]
            if not self.interactive:
                raise
            sys.stdout.write("\n")
            stderr_console().print("interrupted", style="dim")
        else:
            self.messages.append({"role": "assistant", "content": answer})

    def _answer(self) -> str:
        from sameseed.cli.console import TextWriter, stderr_console, summary
        from sameseed.cli.generate import as_json

        writer = TextWriter(sys.stdout, self.llm.tokenizer, self.args.show_draft)
        text = ""
        try:
            for delta in self.llm.chat_stream(self.messages, self.params):
                text += delta.text
                if not self.args.json:
                    writer.write(delta)
                if delta.completion is not None:
                    if self.args.json:
                        print(json.dumps({"role": "assistant"} | as_json(delta.completion)), flush=True)
                    else:
                        print(flush=True)
                        if self.interactive:
                            stderr_console().print(summary(delta.completion.metrics), style="dim", soft_wrap=True)
        finally:
            if not self.args.json:
                writer.end()
        return text
