"""Promises about texts: again, under load, streamed, cached, later, sampled; with speculation off and on."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

from sameseed_verify import prompts
from sameseed_verify.ask import ServedText, ServerQuestion
from sameseed_verify.inquiry import Evidence, Inquiry

LONG = 1200  # characters of a prompt for the prefix cache, enough for many cache blocks
MOST_LONG = 4  # number of these long prompts


async def repeat(inquiry: Inquiry, evidence: Evidence) -> None:
    """A greedy text asked for again, alone, is the same."""
    await _each_alone(inquiry, evidence, "again")


async def stream(inquiry: Inquiry, evidence: Evidence) -> None:
    """A streamed text, put together, is the one that comes as a whole."""
    await _each_alone(inquiry, evidence, "whole", stream=False)


async def later(inquiry: Inquiry, evidence: Evidence) -> None:
    """The same greedy text comes at the end of all questions."""
    evidence.numbers["seconds_later"] = round(inquiry.asker.passed, 1)
    await _each_alone(inquiry, evidence, "later")


async def _each_alone(inquiry: Inquiry, evidence: Evidence, way: str, **more: Any) -> None:
    """Ask every prompt again, one after the other; `more`: fields of ServerQuestion."""
    for i in range(len(inquiry.prompts)):
        inquiry.compare(evidence, way, i, await inquiry.asker.ask(inquiry.question(i, **more)))


async def again(inquiry: Inquiry, evidence: Evidence) -> None:
    """Greedy texts are those of the earlier report."""
    assert inquiry.earlier is not None
    evidence.notes.append(f"the earlier report is of {inquiry.earlier['time']}")
    known = {text["asked"]: text for text in inquiry.earlier["texts"]}
    for prompt, found in zip(inquiry.prompts, inquiry.alone, strict=True):
        told = known.get(prompt.said)
        if told is not None and told["error"] is None:
            before = ServedText(told["text"], told["finish_reason"], told["num_tokens"])
            evidence.compare(f"{prompt.id}, {inquiry.earlier['time']}", before, found)
    if not any(prompt.said in known for prompt in inquiry.prompts):
        evidence.missing = "the earlier report has none of these prompts; give the same --prompts and --requests"


async def load(inquiry: Inquiry, evidence: Evidence) -> None:
    """A greedy text is the same whatever else the server is doing."""
    noise = random.Random(f"load {inquiry.args.seed}")
    own = [(i, inquiry.question(i)) for i in range(len(inquiry.prompts))]
    beside = [(-1, companion(inquiry, noise)) for _ in range(max(2, len(own) // 2))]
    first = [*own, *beside]
    noise.shuffle(first)
    most = 0
    for jobs in (first, own[::-1]):
        answers = await inquiry.asker.ask_together([q for _, q in jobs], inquiry.args.concurrency)
        most = max(most, overlap(answers))
        for (i, _), answer in zip(jobs, answers, strict=False):
            if i >= 0:
                inquiry.compare(evidence, f"{inquiry.args.concurrency} at once", i, answer)
    evidence.numbers["written_at_once"] = most
    if most < 2:
        evidence.missing = "no two answers were written at the same time: the server takes one request after the other"


def companion(inquiry: Inquiry, noise: random.Random) -> ServerQuestion:
    """A sampled request of random length, which runs at the same time as the compared requests."""
    text = "\n".join(noise.choice(inquiry.prompts).said for _ in range(noise.randrange(1, 3)))
    sampled = {"temperature": 0.9}
    prompt = prompts.as_prompt(text[-LONG:], inquiry.chat)
    return ServerQuestion(prompt, noise.randrange(4, inquiry.args.max_tokens + 1), fields=sampled)


def overlap(answers: Seq[ServedText]) -> int:
    """The largest number of answers that were generated at the same time."""
    spans = [(a.moments[0], a.moments[-1]) for a in answers if a.moments]
    return max((sum(first <= at <= last for first, last in spans) for at, _ in spans), default=0)


async def prefix(inquiry: Inquiry, evidence: Evidence) -> None:
    """A greedy text is the same whether its prompt was in the prefix cache or not."""
    told = hits = 0
    room = LONG if inquiry.max_model_len is None else min(LONG, 2 * (inquiry.max_model_len - inquiry.args.max_tokens))
    whole = "\n\n".join(p.said for p in inquiry.prompts)
    on = {"ignore_eos": True} if inquiry.asker.extras else {}  # the salt also decides where a text would end
    for n, start in enumerate(inquiry.prompts[:MOST_LONG]):
        text = f"{inquiry.asker.salt()}\n{start.said}\n\n{whole}"[: max(room, 100)]  # the salt makes the prompt new
        long, half = (prompts.as_prompt(part, inquiry.chat) for part in (text, text[: len(text) // 2]))
        asked = ServerQuestion(long, inquiry.args.max_tokens, salt=inquiry.asker.salt(), fields=on)
        cold, hit = await inquiry.asker.ask(asked), await inquiry.asker.ask(asked)
        other = replace(asked, salt=inquiry.asker.salt())  # it finds the first half alone
        _, partly = await inquiry.asker.ask(replace(other, prompt=half, max_tokens=1)), await inquiry.asker.ask(other)
        for way, answer in (("found", hit), ("found in part", partly)):
            evidence.compare(f"long prompt {n + 1}, {way}", cold, answer)
            told += answer.num_cached is not None
            hits += bool(answer.num_cached)
    evidence.numbers["cache_hits"] = hits
    if not told:
        evidence.missing = "the server does not tell what it found in a prefix cache (cached_tokens)"
    elif hits < MOST_LONG:
        evidence.missing = f"{hits} requests found something in the prefix cache, at least {MOST_LONG} are needed"


MOST_SEEDED = 6  # most prompts asked with seeds
SAMPLING = {"temperature": 0.8, "top_p": 0.95}
LEAST_DRAFTED = 32  # least draft tokens, some accepted and some rejected, for the promise to be shown
# Request fields that switch speculation off and on. They count only if the answers confirm it.
SWITCHES: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    ({"speculation": "off"}, {"speculation": "fixed"}),  # sameseed
    ({"speculative.n_max": 0}, {}),  # llama-server, the versions that read it
)


async def seeds(inquiry: Inquiry, evidence: Evidence) -> None:
    """A sampled text with its seed comes again, alone and under load."""
    lengths = [answer.num_tokens for answer in inquiry.alone]  # prefer long answers: an empty one shows nothing
    indices = sorted(range(len(lengths)), key=lambda i: -lengths[i])[:MOST_SEEDED]
    ask, seed = inquiry.asker.ask, inquiry.args.seed
    wheres = [f"{inquiry.prompts[i].id}, seed {seed + i}" for i in indices]
    same = [inquiry.question(i, fields={**SAMPLING, "seed": seed + i}) for i in indices]
    others = [inquiry.question(i, fields={**SAMPLING, "seed": seed + 1000 + i}) for i in indices]
    firsts: list[ServedText] = []
    alone = varied = 0
    for where, mine, another in zip(wheres, same, others, strict=True):
        firsts.append(first := await ask(mine))
        if firsts[0].refused:
            evidence.missing = f"the server refuses seeds ({firsts[0].detail})"
            return
        alone += evidence.compare(f"{where}, again", first, await ask(mine))
        other = await ask(another)
        varied += other.error is None and other.text != first.text
    together = await inquiry.asker.ask_together(same, inquiry.args.concurrency)
    for where, first, answer in zip(wheres, firsts, together, strict=False):
        evidence.compare(f"{where}, {inquiry.args.concurrency} at once", first, answer)
    evidence.numbers["other_seeds_with_another_text"] = varied
    if not varied:
        evidence.missing = "no other seed gave another text: the server may sample nothing, or read no seed"
    elif not alone and evidence.compared:
        evidence.notes.append("the same seed never gave the same text: the server seems not to read it")


async def speculation(inquiry: Inquiry, evidence: Evidence) -> None:
    """A greedy text is the same with speculation off and on."""
    if not inquiry.asker.extras:
        evidence.missing = "the server refuses fields beyond OpenAI's, so no request can switch speculation"
        return

    async def asked(i: int, *switch: dict[str, Any]) -> list[ServedText]:
        return [await inquiry.asker.ask(inquiry.question(i, fields=fields)) for fields in switch]

    for switch in SWITCHES:
        without, drafting = pair = await asked(0, *switch)
        if without.error is drafting.error is None and without.num_drafted == 0 and drafting.num_drafted is not None:
            break
    else:
        evidence.missing = "no request could switch speculation: no such field, or answers do not tell of drafts"
        return
    pairs = [pair] + [await asked(i, *switch) for i in range(1, len(inquiry.prompts))]
    for prompt, (without, drafting) in zip(inquiry.prompts, pairs, strict=True):
        evidence.compare(f"{prompt.id}, speculation on", without, drafting)
    drafted = sum(drafting.num_drafted or 0 for _, drafting in pairs)
    accepted = sum(drafting.num_accepted for _, drafting in pairs)
    evidence.numbers |= {"draft_tokens": drafted, "accepted": accepted, "rejected": drafted - accepted}
    if still := sum(without.num_drafted or 0 for without, _ in pairs):
        evidence.count("drafted_though_off", still)
        evidence.missing = f"{still} tokens were drafted though requests switched that off: it is not read"
    elif not drafted:
        evidence.missing = "nothing was drafted: start the server with a draft"
    elif drafted < LEAST_DRAFTED or not 0 < accepted < drafted:
        short = f"{drafted} tokens drafted, {accepted} accepted: at least {LEAST_DRAFTED} are needed, some rejected"
        evidence.missing = f"{short}; give more --requests or --max-tokens"
