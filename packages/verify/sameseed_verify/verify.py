"""The whole inquiry: connect to the server, test each promise, and write one report."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx

from sameseed_verify import VerifyError, numbers, texts, ties, wire  # each registers its promises
from sameseed_verify.advice import advice, engine_of
from sameseed_verify.ask import NOT_SENT, Asker, RequestBudget, ServerQuestion
from sameseed_verify.inquiry import BROKEN, HOLDS, LEAST_TEXTS, NOT_SHOWN, PROMISES, Evidence, Inquiry
from sameseed_verify.prompts import BUILT_IN, Prompt, as_prompt, read_prompts, take
from sameseed_verify.reading import ServedText
from sameseed_verify.wire import Endpoint

SCHEMA = "sameseed.server/1"
ORDER = ("logprobs", "ties", "repeat", "load", "stream", "prefix", "speculation", "seeds", "later", "again")
# Requests of all promises: FIXED in total, 4 for each seeded prompt, and EACH for every prompt. The latter are those of
# `alone`, `logprobs`, `repeat`, `load` (2.5), `stream`, `speculation` (2) and `later`.
FIXED = 3 + 3 * ties.MOST_TIES + 4 * ties.MOST_BIASED + 4 * texts.MOST_LONG + numbers.MOST_SCORED
EACH = 9.5
SHARE = 0.7  # share of the allowed seconds to plan for


def needed(count: int) -> int:
    """Number of requests needed to test all promises with `count` prompts."""
    return FIXED + 4 * min(count, texts.MOST_SEEDED) + math.ceil(EACH * count)


LEAST_REQUESTS = needed(LEAST_TEXTS)
EXIT_CODES = {HOLDS: 0, BROKEN: 1, NOT_SHOWN: 3}
Tick = Callable[[str, int, int], None]  # name of a promise, number of promises done, number of promises


@dataclass(frozen=True)
class ServerSettings:
    """Settings of an inquiry. `requests` and `seconds` are upper bounds; `concurrency`: requests at once under load.

    `prompts` None: the package's own, as texts for completions and as conversations for chat. `only`: ids of the
    promises to test; empty: all. Raises VerifyError for a value out of range.
    """

    prompts: Path | None = None
    num_prompts: int | None = None
    max_tokens: int = 48
    requests: int = 200
    seconds: float = 300.0
    concurrency: int = 4
    timeout: float = 120.0
    seed: int = 1
    only: Seq[str] = field(default=())

    def __post_init__(self) -> None:
        if self.requests < LEAST_REQUESTS:
            raise VerifyError(f"--requests must be at least {LEAST_REQUESTS}: fewer show nothing, got {self.requests}")
        for name, least in (("max_tokens", 16), ("concurrency", 2)):
            if getattr(self, name) < least:
                raise VerifyError(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(self, name)}")
        if self.num_prompts is not None and self.num_prompts < 1:
            raise VerifyError(f"--num-prompts must be at least 1, got {self.num_prompts}")
        for name in ("seconds", "timeout"):
            if not getattr(self, name) > 0:
                raise VerifyError(f"--{name} must be above 0, got {getattr(self, name):g}")
        if unknown := [name for name in self.only if name not in PROMISES]:
            raise VerifyError(f"--only knows no promise {unknown[0]!r} (there are: {', '.join(ORDER)})")


async def verify(
    client: httpx.AsyncClient,
    endpoint: Endpoint,
    settings: ServerSettings,
    earlier: Mapping[str, Any] | None = None,
    tick: Tick = lambda name, done, total: None,
) -> dict[str, Any]:
    """Test all promises; returns the report. Raises VerifyError if the server is missing or cannot be asked.

    A server that goes away later is no error: the report then holds the results until that moment.
    """
    if "again" in settings.only and earlier is None:
        raise VerifyError("--only again needs --again FILE")
    chosen = [n for n in ORDER if n in (settings.only or ORDER) and (n != "again" or earlier is not None)]
    asker, about = await meet(client, endpoint, settings)
    limit = about.get("max_model_len")
    inquiry = Inquiry(asker, [], settings.max_tokens, settings.concurrency, settings.seed)
    inquiry.max_model_len, inquiry.earlier = limit if isinstance(limit, int) else None, earlier
    if earlier is not None:
        _comparable(earlier, asker.endpoint, settings)
    tick("each prompt alone", 0, len(chosen))
    await ask_alone(inquiry, settings)
    found: dict[str, Evidence] = {}
    if "ties" in chosen and "logprobs" not in chosen:  # near ties are found by log-probabilities
        await PROMISES["logprobs"].ask(inquiry, Evidence())
    for done, name in enumerate(chosen):
        tick(PROMISES[name].name, done, len(chosen))
        evidence = found[name] = Evidence()
        if not asker.budget.died or name == "again":  # which compares answers that are here already
            await PROMISES[name].ask(inquiry, evidence)
    return report(inquiry, settings, engine_of(about.get("owned_by")), found)


async def meet(
    client: httpx.AsyncClient, endpoint: Endpoint, settings: ServerSettings
) -> tuple[Asker, Mapping[str, Any]]:
    """Find out what the server accepts: the model's name, completions or chat, fields beyond OpenAI's.

    Returns an Asker, and what the server says of its model. Raises VerifyError.
    """
    about = await wire.introduce(client, endpoint)
    endpoint = replace(endpoint, model=endpoint.model or str(about.get("id", "")))
    budget = RequestBudget(settings.requests, settings.seconds)
    first = ServedText()
    for chat in (False, True) if not endpoint.chat else (True,):
        for extras in (True, False):
            asker = Asker(client, replace(endpoint, chat=chat), budget, settings.timeout)
            asker.extras = extras
            first = await asker.ask(ServerQuestion(as_prompt("one two three four", chat), 16))
            if first.error is None:
                return asker, about
            if first.error == NOT_SENT:
                raise VerifyError(f"{budget.ended} before anything could be asked; give more")
            if not first.refused or first.error in ("HTTP 404", "HTTP 405"):
                break  # the request did not fail because of the additional fields
        if first.error not in ("HTTP 404", "HTTP 405"):
            break
    raise VerifyError(
        f"{endpoint.url} does not answer as a server with OpenAI's API ({first.error}: {first.detail}); give the "
        "address of one, and the model's --name"
    )


def choose_prompts(settings: ServerSettings, chat: bool) -> list[Prompt]:
    """As many prompts as the allowed requests permit, spread evenly over the file."""
    if settings.prompts is not None:
        every = read_prompts(settings.prompts)
    else:
        every = [p for path in BUILT_IN for p in read_prompts(path)]
        if not chat:  # half of each text: after a whole turn without a chat template, the answer may end at once
            every = [Prompt(p.id, p.said[: len(p.said) // 2].rstrip()) for p in every]
    allowed = [n for n in range(1, len(every) + 1) if needed(n) <= settings.requests]
    return take(every, min(len(allowed), settings.num_prompts or len(every)))


async def ask_alone(inquiry: Inquiry, settings: ServerSettings) -> None:
    """Ask each prompt alone, as many as requests and seconds allow. Raises VerifyError if the first one is refused."""
    chosen = choose_prompts(settings, inquiry.chat)
    inquiry.prompts, start = chosen, time.monotonic()
    for i in range(len(chosen)):
        answer = await inquiry.asker.ask(inquiry.question(i))
        if i == 0 and answer.refused:
            raise VerifyError(f"the server refuses prompt {chosen[0].id} ({answer.error}: {answer.detail})")
        inquiry.alone.append(answer)
        each = (time.monotonic() - start) / (i + 1)
        if i + 1 >= LEAST_TEXTS and each * needed(i + 2) > SHARE * settings.seconds:
            break
    inquiry.prompts = chosen[: len(inquiry.alone)]


def model_name(model: str) -> str:
    """A model's name in a report: for a folder or file, its name without the path, which may be private."""
    return Path(model).resolve().name if Path(model).exists() else model


def _comparable(earlier: Mapping[str, Any], endpoint: Endpoint, settings: ServerSettings) -> None:
    """Raise VerifyError if an earlier report has another model, API or length, and so cannot be compared."""
    mine = {"model": model_name(endpoint.model), "chat": endpoint.chat, "max_tokens": settings.max_tokens}
    for name, value in mine.items():
        if (told := earlier["config"].get(name)) != value:
            raise VerifyError(
                f"the report of --again has {name} {told!r}, this run {value!r}: give a report of the same"
            )


def report(inquiry: Inquiry, settings: ServerSettings, engine: str, found: Mapping[str, Evidence]) -> dict[str, Any]:
    """The report, schema `sameseed.server/1`."""
    budget, entries = inquiry.asker.budget, []
    for name, evidence in found.items():
        status, why = evidence.settle(budget.ended, budget.died)
        entries.append(
            {
                "id": name,
                "name": PROMISES[name].name,
                "says": PROMISES[name].says,
                "status": status,
                "why": why,
                **{key: value for key, value in asdict(evidence).items() if key != "missing"},
                "advice": "" if status == HOLDS else advice(engine, name, status == BROKEN),
            }
        )
    return {
        "schema": SCHEMA,
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": f"sameseed-verify {version('sameseed-verify')}",
        "config": _config(inquiry, settings, engine),
        "verdict": overall([e["status"] for e in entries], budget.died),
        "ended": budget.ended,
        "died": budget.died,
        "seconds": round(budget.passed, 1),
        "requests": budget.spent,
        "failures": dict(inquiry.asker.failures),
        "promises": entries,
        "not_asked": [name for name in ORDER if name not in found],
        "texts": [_text(prompt, answer) for prompt, answer in zip(inquiry.prompts, inquiry.alone, strict=True)],
    }


def overall(statuses: Seq[str], died: bool) -> str:
    """The overall verdict: broken if any promise is broken; holds if all hold and the server did not die."""
    if BROKEN in statuses:
        return BROKEN
    return HOLDS if statuses and not died and all(s == HOLDS for s in statuses) else NOT_SHOWN


def _config(inquiry: Inquiry, settings: ServerSettings, engine: str) -> dict[str, Any]:
    return {
        "engine": engine or "unknown",
        "model": model_name(inquiry.asker.endpoint.model),
        "chat": inquiry.chat,
        "extra_fields": inquiry.asker.extras,
        "prompts": "built-in" if settings.prompts is None else model_name(str(settings.prompts)),
        "num_prompts": len(inquiry.prompts),
        **{name: getattr(settings, name) for name in ("max_tokens", "requests", "seconds", "concurrency", "seed")},
    }


def _text(prompt: Prompt, answer: ServedText) -> dict[str, Any]:
    told = {name: getattr(answer, name) for name in ("text", "finish_reason", "num_tokens", "error")}
    return {"prompt": prompt.id, "asked": prompt.said, **told}
