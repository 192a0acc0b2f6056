"""The whole inquiry: connect to the server, test each promise, and write one report."""

from __future__ import annotations

import inspect
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import asdict
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx

from sameseed_verify import VerifyError, numbers, texts
from sameseed_verify.advice import advice, engine_of
from sameseed_verify.ask import NO_KEY, NOT_SENT, Asker, ServedText, ServerQuestion
from sameseed_verify.inquiry import BROKEN, HOLDS, LEAST_TEXTS, NOT_SHOWN, Evidence, Inquiry, Test, VerifyServerArgs
from sameseed_verify.prompts import BUILT_IN, Prompt, as_prompt, read_prompts

SCHEMA = "sameseed.server/1"
PROMISES: Mapping[str, tuple[str, Test]] = {  # by id, in the order in which they are tested: the name and the test
    "logprobs": ("log-probabilities", numbers.logprobs),
    "ties": ("near ties", numbers.ties),
    "repeat": ("asked again", texts.repeat),
    "load": ("under load", texts.load),
    "stream": ("streamed and whole", texts.stream),
    "prefix": ("prefix cache", texts.prefix),
    "speculation": ("speculation", texts.speculation),
    "seeds": ("seeds", texts.seeds),
    "later": ("later", texts.later),
    "again": ("an earlier run", texts.again),
}
# Requests of all promises: FIXED in total, 4 for each seeded prompt, and EACH for every prompt. The latter are those of
# `alone`, `logprobs`, `repeat`, `load` (2.5), `stream`, `speculation` (2) and `later`.
FIXED = 3 + 3 * numbers.MOST_TIES + 4 * numbers.MOST_BIASED + 4 * texts.MOST_LONG + numbers.MOST_SCORED
EACH = 9.5
SHARE = 0.7  # share of the allowed seconds to plan for


def needed(count: int) -> int:
    """Number of requests needed to test all promises with `count` prompts."""
    return FIXED + 4 * min(count, texts.MOST_SEEDED) + math.ceil(EACH * count)


LEAST_REQUESTS = needed(LEAST_TEXTS)
ROUTE = re.compile(r"/(models|(chat/)?completions)$")
VERSION = re.compile(r"/v\d\w*(/|$)")  # e.g. /v3 of OpenVINO's server, /v1beta/openai of Gemini's API
EXIT_CODES = {HOLDS: 0, BROKEN: 1, NOT_SHOWN: 3}
Tick = Callable[[str, int, int], None]  # name of a promise, number of promises done, number of promises


def check(args: VerifyServerArgs) -> None:
    """Raise VerifyError for a value out of range."""
    lowest = {"requests": LEAST_REQUESTS, "max_tokens": 16, "concurrency": 2, "num_prompts": 1}
    for name, least in lowest.items():
        if (value := getattr(args, name)) is not None and value < least:
            more = ": fewer show nothing" if name == "requests" else ""
            raise VerifyError(f"--{name.replace('_', '-')} must be at least {least}{more}, got {value}")
    for name in ("seconds", "timeout"):
        if not getattr(args, name) > 0:
            raise VerifyError(f"--{name} must be above 0, got {getattr(args, name):g}")
    if unknown := [name for name in args.only if name not in PROMISES]:
        raise VerifyError(f"--only knows no promise {unknown[0]!r} (there are: {', '.join(PROMISES)})")


def base_url(url: str) -> str:
    """What a server's routes begin with, e.g. http://host/v1; `url` may name a route or version. Raises VerifyError."""
    given, url = url, url.partition("?")[0].rstrip("/")
    if not url.startswith(("http://", "https://")) or len(url) < len("http://x"):
        raise VerifyError(f"give a server's address, e.g. http://127.0.0.1:8000, got {given!r}")
    before = ROUTE.sub("", url)
    whole = before != url or VERSION.search(url.partition("://")[2])
    return before if whole else f"{url}/v1"


async def verify(
    client: httpx.AsyncClient,
    args: VerifyServerArgs,
    earlier: Mapping[str, Any] | None = None,
    tick: Tick = lambda name, done, total: None,
) -> dict[str, Any]:
    """Test all promises; returns the report, of a server that dies the results so far. Raises VerifyError."""
    check(args)
    if "again" in args.only and earlier is None:
        raise VerifyError("--only again needs --again FILE")
    chosen = [n for n in PROMISES if n in (args.only or PROMISES) and (n != "again" or earlier is not None)]
    asker, about = await meet(client, args)
    limit = about.get("max_model_len")
    inquiry = Inquiry(asker, args, limit if isinstance(limit, int) else None, earlier)
    if earlier is not None:
        _comparable(earlier, inquiry)
    tick("each prompt alone", 0, len(chosen))
    await ask_alone(inquiry)
    found: dict[str, Evidence] = {}
    if "ties" in chosen and "logprobs" not in chosen:  # near ties are found by log-probabilities
        await numbers.logprobs(inquiry, Evidence())
    for done, name in enumerate(chosen):
        title, test = PROMISES[name]
        tick(title, done, len(chosen))
        evidence = found[name] = Evidence()
        if not asker.died or name == "again":  # which compares answers that are here already
            await test(inquiry, evidence)
    return report(inquiry, engine_of(about.get("owned_by")), found)


async def meet(client: httpx.AsyncClient, args: VerifyServerArgs) -> tuple[Asker, Mapping[str, Any]]:
    """Find out what the server accepts: completions or chat, further fields; and its model. Raises VerifyError."""
    url = base_url(args.url)
    asker = Asker(client, url, args.requests, args.seconds, args.timeout, args.name or "")
    about = await asker.introduce()
    asker.model = asker.model or str(about.get("id", ""))
    first = ServedText()
    for chat in (True,) if args.chat else (False, True):
        for extras in (True, False):
            asker.chat, asker.extras = chat, extras
            first = await asker.ask(ServerQuestion(as_prompt("one two three four", chat), 16))
            if first.error is None:
                return asker, about
            if first.error == NOT_SENT:
                raise VerifyError(f"{asker.ended} before anything could be asked; give more")
            if not first.refused or first.error in ("HTTP 404", "HTTP 405"):
                break  # the request did not fail because of the additional fields
        if not first.refused:
            break
    if first.error in ("HTTP 401", "HTTP 403"):
        raise VerifyError(f"{url} {NO_KEY} ({first.detail})")
    if first.detail.startswith("Unsupported"):  # of OpenAI's reasoning models
        raise VerifyError(f"{first.detail} Only models that take max_tokens and temperature 0 can be asked")
    said = f"{url} does not answer as a server with OpenAI's API ({first.error}: {first.detail})"
    raise VerifyError(f"{said}; give the address of one, and the model's --name")


def choose_prompts(args: VerifyServerArgs, chat: bool) -> list[Prompt]:
    """As many prompts as the allowed requests permit, spread evenly over the file."""
    if args.prompts is not None:
        every = read_prompts(args.prompts)
    else:
        every = [p for path in BUILT_IN for p in read_prompts(path)]
        if not chat:  # half of each text: after a whole turn without a chat template, the answer may end at once
            every = [Prompt(p.id, p.said[: len(p.said) // 2].rstrip()) for p in every]
    allowed = sum(needed(n) <= args.requests for n in range(1, len(every) + 1))
    count = min(allowed, args.num_prompts or allowed)
    return [every[i * len(every) // count] for i in range(count)]


async def ask_alone(inquiry: Inquiry) -> None:
    """Ask each prompt alone, as many as requests and seconds allow. Raises VerifyError if the first one is refused."""
    inquiry.prompts, start = choose_prompts(inquiry.args, inquiry.chat), time.monotonic()
    for i, prompt in enumerate(inquiry.prompts):
        answer = await inquiry.asker.ask(inquiry.question(i))
        if i == 0 and answer.refused:
            raise VerifyError(f"the server refuses prompt {prompt.id} ({answer.error}: {answer.detail})")
        inquiry.alone.append(answer)
        each = (time.monotonic() - start) / (i + 1)
        if i + 1 >= LEAST_TEXTS and each * needed(i + 2) > SHARE * inquiry.args.seconds:
            break
    inquiry.prompts = inquiry.prompts[: len(inquiry.alone)]


def model_name(model: str) -> str:
    """A model's name in a report: for a folder or file, its name without the path, which may be private."""
    return Path(model).resolve().name if Path(model).exists() else model


def _comparable(earlier: Mapping[str, Any], inquiry: Inquiry) -> None:
    """Raise VerifyError if an earlier report has another model, API or length, and so cannot be compared."""
    mine = _config(inquiry, "")
    for name in ("model", "chat", "max_tokens"):
        if (told := earlier["config"].get(name)) != mine[name]:
            raise VerifyError(f"--again has {name} {told!r}, this run {mine[name]!r}: give a report of the same")


def report(inquiry: Inquiry, engine: str, found: Mapping[str, Evidence]) -> dict[str, Any]:
    """The report, schema `sameseed.server/1`."""
    asker, entries = inquiry.asker, []
    for name, evidence in found.items():
        status, why = evidence.settle(asker.ended, asker.died)
        tested, (title, test) = asdict(evidence), PROMISES[name]
        del tested["missing"]
        said = {"id": name, "name": title, "says": inspect.getdoc(test), "status": status, "why": why}
        advised = "" if status == HOLDS else advice(engine, name, status == BROKEN)
        entries.append({**said, **tested, "advice": advised})
    return {
        "schema": SCHEMA,
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": f"sameseed-verify {version('sameseed-verify')}",
        "config": _config(inquiry, engine),
        "verdict": overall([e["status"] for e in entries], asker.died),
        "ended": asker.ended,
        "died": asker.died,
        "seconds": round(asker.passed, 1),
        "requests": asker.spent,
        "failures": dict(asker.failures),
        "promises": entries,
        "not_asked": [name for name in PROMISES if name not in found],
        "texts": [
            {"prompt": p.id, "asked": p.said, "text": a.text, "finish_reason": a.finish_reason}
            | {"num_tokens": a.num_tokens, "error": a.error}
            for p, a in zip(inquiry.prompts, inquiry.alone, strict=True)
        ],
    }


def overall(statuses: Seq[str], died: bool) -> str:
    """The overall verdict: broken if any promise is broken; holds if all hold and the server did not die."""
    if BROKEN in statuses:
        return BROKEN
    return HOLDS if statuses and not died and all(s == HOLDS for s in statuses) else NOT_SHOWN


def _config(inquiry: Inquiry, engine: str) -> dict[str, Any]:
    args = inquiry.args
    return {
        "engine": engine or "unknown",
        "model": model_name(inquiry.asker.model),
        "chat": inquiry.chat,
        "extra_fields": inquiry.asker.extras,
        "prompts": "built-in" if args.prompts is None else model_name(str(args.prompts)),
        "num_prompts": len(inquiry.prompts),
        **{name: getattr(args, name) for name in ("max_tokens", "requests", "seconds", "concurrency", "seed")},
    }
