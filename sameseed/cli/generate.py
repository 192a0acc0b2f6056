"""`sameseed generate`: one prompt, one text (or `--n` of them), streaming."""

from __future__ import annotations

import json
import sys
from collections import deque

from sameseed.cli.console import TextWriter, legend, level_line, load_llm, stderr_console, summary
from sameseed.cli.flags import GenerateArgs
from sameseed.cli.options import Parsed, stdin_text
from sameseed.engine.llm import LLM
from sameseed.errors import RequestError
from sameseed.lines import read_text
from sameseed.request import Completion, Delta, FinishReason, SamplingParams
from sameseed.spec.drafter import level_metrics


def run(parsed: Parsed[GenerateArgs]) -> int:
    """Load, write."""
    args, params = parsed.args, parsed.params
    prompt = read_prompt(args)
    llm = load_llm(parsed.engine.model, quiet=args.json, **parsed.engine.settings)
    tokens: str | list[int] = prompt
    if args.chat:
        system = [{"role": "system", "content": args.system}] if args.system else []
        tokens = llm.tokenizer.chat([*system, {"role": "user", "content": prompt}])
    return _write_json(llm, tokens, params) if args.json else _write_text(llm, tokens, params, args.show_draft)


def read_prompt(args: GenerateArgs) -> str:
    """The prompt: the argument, a file or standard input, the last two without a final newline. Raises RequestError."""
    if args.prompt is not None and args.file is not None:
        raise RequestError("a prompt and --file were given; leave one out")
    if args.system is not None and not args.chat:
        raise RequestError("--system needs --chat: only a chat template knows system messages")
    if args.prompt is not None and args.prompt != "-":
        text = args.prompt
    elif args.file is not None:
        text = read_text(args.file, "the prompt", "give a UTF-8 text file", RequestError).removesuffix("\n")
    else:
        text = stdin_text("prompt").removesuffix("\n")
    if not text:
        raise RequestError("the prompt is empty; give at least one token of text")
    return text


def _write_text(llm: LLM, prompt: str | list[int], params: SamplingParams, show_draft: bool) -> int:
    console, writer = stderr_console(), None
    held: list[deque[Delta]] = [deque() for _ in range(params.n)]
    done: list[Completion] = []
    try:
        for delta in llm.stream(prompt, params):
            held[delta.index].append(delta)
            while len(done) < params.n and held[len(done)]:  # the first unfinished one streams, the others wait for it
                if writer is None:
                    writer = TextWriter(sys.stdout, show_draft)
                    sys.stdout.write(f"--- {len(done) + 1} of {params.n} ---\n" if params.n > 1 else "")
                now = held[len(done)].popleft()
                writer.write(now)
                if now.completion is not None:
                    done.append(now.completion)
                    sys.stdout.write("\n")
                    writer = None
    except KeyboardInterrupt:
        if writer is not None:
            writer.end()
        if not sys.stdout.isatty():
            sys.stdout.write("\n")
        raise
    sys.stdout.flush()
    if show_draft:
        console.file.write(legend(sys.stdout, console.file) + "\n")
    for completion in done:
        console.print(summary(completion.metrics), style="dim", soft_wrap=True)
    for name, metrics in level_metrics(llm.engine.drafter):
        console.print(level_line(name, metrics), style="dim", soft_wrap=True)
    if params.seed is None and not params.greedy and done:
        console.print(f"seed {done[0].seed} writes this again", style="dim")
    failed = [c for c in done if c.finish_reason is FinishReason.ERROR]
    for completion in failed:
        console.print(f"error: {completion.error}", soft_wrap=True, markup=False)
    return 1 if failed else 0


def _write_json(llm: LLM, prompt: str | list[int], params: SamplingParams) -> int:
    """Print one line per completion. After an interruption, also print each unfinished one with its text so far."""
    latest: dict[int, Delta] = {}
    code = 0
    try:
        for delta in llm.stream(prompt, params):
            latest[delta.index] = delta
            if delta.completion is not None:
                # Add counters of the drafters below (over the engine's life so far) and warnings, if there are any.
                levels = {name: metrics.as_dict() for name, metrics in level_metrics(llm.engine.drafter)}
                remarks = {"levels": levels, "warnings": list(llm.engine.alarm.texts)}
                found = {name: value for name, value in remarks.items() if value}
                print(json.dumps(as_json(delta.completion) | found), flush=True)
                code = code or int(delta.completion.finish_reason is FinishReason.ERROR)
    except KeyboardInterrupt:
        for index, last in ((i, latest.get(i)) for i in range(params.n)):
            text, token_ids = ("", ()) if last is None else last.so_far()
            if last is None or last.completion is None:
                line = {"index": index, "text": text, "token_ids": list(token_ids), "finish_reason": "abort"}
                print(json.dumps(line), flush=True)
        raise
    return code


def as_json(completion: Completion) -> dict[str, object]:
    """A completion as plain data."""
    line: dict[str, object] = {
        "index": completion.index,
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "accepted": list(completion.accepted),
        "finish_reason": completion.finish_reason.value,
        "seed": completion.seed,
        **({"error": completion.error} if completion.error else {}),
        "metrics": completion.metrics.as_dict(),
    }
    if completion.logprobs is not None:
        line["logprobs"] = [
            {"token_id": p.token_id, "logprob": p.logprob, "top": [list(t) for t in p.top]} for p in completion.logprobs
        ]
    return line
