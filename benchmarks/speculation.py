"""Speculation on a target (a twin, mostly) against its own plain decoding, and against llama.cpp with the same weights.

    .venv/bin/python benchmarks/speculation.py --model twins/8b --format w4a8 \
        --drafts twins/1b-draft 'suffix + twins/1b-draft' --ks 3 5 --draft-format w4a8-g32 \
        --gguf twins/8b-q4_0.gguf --gguf-draft twins/1b-draft-q4_0.gguf --home PEERS

Greedy, one request at a time, texts of a fixed length. All arms take turns at each prompt, and who begins rotates. The
peer is frozen while others run. A text's seconds go from its first token to its last; its ratio is plain's seconds over
the arm's, and the mean is over prompts. One record a run.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence as Seq
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "peers"))

from client import Client

from sameseed import SamplingParams
from sameseed.config import SpecConfig, draft_text, parse_draft
from sameseed.engine.levels import with_heads
from sameseed.engine.settings import make_config
from sameseed.study import record
from sameseed.study.measure import Bench, Run, run_batch
from sameseed.study.workload import DEFAULT_PROMPTS, Arm, read_prompts

SCHEMA = "sameseed.speculation/1"
TIMEOUT = 1800.0  # seconds that a peer may take for anything


@dataclass
class Text:
    """One text as one arm wrote it."""

    seconds: float
    ttft: float
    tokens: list[int]
    drafted: int = 0
    accepted: int = 0


@dataclass
class Way:
    """An arm: ours or the peer's, and its texts, one list for each prompt."""

    label: str
    arm: Arm | None = None
    num_draft: int = 0
    about: dict[str, Any] = field(default_factory=dict)
    texts: list[list[Text]] = field(default_factory=list)


def arguments(argv: Seq[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True, help="the target's folder")
    parser.add_argument("--format", default="auto")
    parser.add_argument("--kv-format", default="auto")
    parser.add_argument("--drafts", nargs="*", default=[], help="as generate's --draft")
    parser.add_argument("--ks", nargs="*", type=int, default=[4])
    parser.add_argument("--draft-format", default=None)
    parser.add_argument(
        "--draft-options",
        default=None,
        help='JSON: options of all drafts, or a list, one for each, which may hold its own "k" and "label"',
    )
    parser.add_argument("--policy", default=None)
    parser.add_argument("--gguf", type=Path, default=None, help="the same target for llama.cpp")
    parser.add_argument("--gguf-draft", type=Path, default=None)
    parser.add_argument("--gguf-ks", nargs="*", type=int, default=[3])
    parser.add_argument("--home", type=Path, default=None, help="folder of the peers' environments (make peers)")
    parser.add_argument("--prompts", type=Path, default=DEFAULT_PROMPTS)
    parser.add_argument("--num-prompts", type=int, default=None)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--max-model-len", type=int, default=512)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--title", required=True, help="what is measured, for the table; a later run replaces it there")
    parser.add_argument("--note", default="", help="a sentence for the table")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/headline.jsonl"))
    o = parser.parse_args(argv)
    if o.gguf is not None and o.home is None:
        parser.error("--gguf needs --home, the folder of the peers' environments; `make peers` makes it")
    if o.gguf is None and o.gguf_draft is not None:
        parser.error("--gguf-draft needs --gguf, its target")
    return o


def our_ways(o: argparse.Namespace) -> list[Way]:
    """Plain decoding, and every draft with every k."""
    ways = [Way("plain", Arm("plain", SpecConfig()))]
    options = json.loads(o.draft_options) if o.draft_options else {}
    for i, draft in enumerate(o.drafts):
        own = dict(options[i] if isinstance(options, list) else options)
        label = own.pop("label", None)
        for k in [own.pop("k")] if "k" in own else o.ks:
            made = make_config(
                parse_draft(draft),
                num_draft_tokens=k,
                draft_options=own,
                draft_format=o.draft_format,
                policy=o.policy,
            ).spec
            if o.draft_format is not None:
                made = replace(made, below=tuple(with_format(b, o.draft_format) for b in made.below))
            made = with_heads(made)
            name = label or f"{draft_text(made)} k={k}"
            ways.append(Way(name, Arm(name, made), k, {"options": own, "draft": draft_text(made)}))
    return ways


def with_format(spec: SpecConfig, name: str) -> SpecConfig:
    """A level and those below it, their models in one format."""
    return replace(spec, format=name, below=tuple(with_format(b, name) for b in spec.below))


def peer_ways(o: argparse.Namespace) -> list[Way]:
    """llama.cpp plain, and with its draft at every k."""
    if o.gguf is None:
        return []
    ks = o.gguf_ks if o.gguf_draft is not None else []
    return [Way("llama.cpp plain"), *(Way(f"llama.cpp own speculation k={k}", None, k) for k in ks)]


def ours(bench: Bench, arm: Arm, prompt: tuple[int, ...], params: SamplingParams) -> Text:
    """Write one text with an arm of ours."""
    run = Run()
    run_batch(bench.install(arm), [(prompt, params)], run)
    done = run.completions[0]
    spec, ttft = done.metrics.spec, done.metrics.time_to_first_token
    return Text(run.seconds - ttft, ttft, list(done.token_ids), spec.num_draft_tokens, spec.num_accepted_tokens)


def turns(ways: Seq[Way], num_prompts: int, repeat: int) -> Iterator[tuple[int, Way]]:
    """Which prompt by which way, in turn; who begins rotates."""
    for r in range(repeat):
        for p in range(num_prompts):
            first = (r + p) % len(ways)
            for way in [*ways[first:], *ways[:first]]:
                yield p, way


def per_prompt(way: Way) -> list[float]:
    """Median seconds of each prompt."""
    return [median(t.seconds for t in texts) for texts in way.texts]


def summary(way: Way, plain: Way, reference: Way) -> dict[str, Any]:
    """What the record holds of a way; `reference`: whose texts should be the same."""
    texts = [t for each in way.texts for t in each]
    seconds, base = per_prompt(way), per_prompt(plain)
    drafted, accepted = sum(t.drafted for t in texts), sum(t.accepted for t in texts)
    tokens = sum(len(t.tokens) - 1 for t in texts)
    return {
        "label": way.label,
        "num_draft_tokens": way.num_draft,
        **way.about,
        "seconds": [[t.seconds for t in each] for each in way.texts],
        "ttft_s": [[t.ttft for t in each] for each in way.texts],
        "tokens_per_s": tokens / sum(t.seconds for t in texts),
        "speedup_mean": mean(b / s for b, s in zip(base, seconds, strict=True)),
        "speedup_total": sum(base) / sum(seconds),
        "ttft_ratio": median(
            t.ttft / b.ttft
            for mine, its in zip(way.texts, plain.texts, strict=True)
            for t, b in zip(mine, its, strict=True)
        ),
        "drafted": drafted,
        "accepted": accepted,
        "acceptance_rate": accepted / drafted if drafted else None,
        "equal_texts": sum(a[0].tokens == b[0].tokens for a, b in zip(way.texts, reference.texts, strict=True)),
    }


def main(argv: Seq[str] | None = None) -> int:
    """Load everything, take turns, write the record, print the table."""
    o = arguments(argv)
    mine, peers = our_ways(o), peer_ways(o)
    ways = [*mine, *peers]
    settings = {"format": o.format, "kv_format": o.kv_format, "max_model_len": o.max_model_len, "threads": o.threads}
    bench = Bench(o.model, [w.arm for w in mine if w.arm], {**settings, "max_num_seqs": 1})
    prompts = [p.encode(bench.llm.tokenizer) for p in read_prompts(o.prompts, o.num_prompts)]
    client = None
    if peers:
        client = Client(o.home / "llama_cpp" / "bin" / "python", "llama_cpp", Path("build/peer.log"))
        options = {} if o.gguf_draft is None else {"draft": str(o.gguf_draft.resolve())}
        loaded = client.ask(
            TIMEOUT,
            do="load",
            model=str(o.gguf.resolve()),
            threads=o.threads,
            max_len=o.max_model_len,
            batch=1,
            options=options,
        )
        if "error" in loaded:
            raise SystemExit(f"llama.cpp: {loaded['error']}")
    params = SamplingParams(max_tokens=o.max_tokens, ignore_eos=True, seed=0)

    def write(way: Way, prompt: tuple[int, ...], how: SamplingParams) -> Text:
        if way.arm is not None:
            return ours(bench, way.arm, prompt, how)
        assert client is not None
        answer = client.ask(TIMEOUT, do="write", tokens=list(prompt), count=how.max_tokens, num_draft=way.num_draft)
        if "error" in answer:
            raise SystemExit(f"llama.cpp: {answer['error']}")
        return Text(*(answer[name] for name in ("seconds", "ttft", "tokens", "drafted", "accepted")))

    for way in ways:
        write(way, prompts[0][:64], replace(params, max_tokens=8))
        way.texts = [[] for _ in prompts]
    for p, way in turns(ways, len(prompts), o.repeat):
        text = write(way, prompts[p], params)
        way.texts[p].append(text)
        print(f"{p + 1}/{len(prompts)} {way.label}: {text.seconds:.2f} s", file=sys.stderr, flush=True)
    if client is not None:
        client.close()
    found = [summary(w, mine[0] if w.arm else peers[0], mine[0] if w.arm else peers[0]) for w in ways]
    line = {
        "schema": SCHEMA,
        "date": record.now(),
        "commit": record.commit(),
        "machine": record.machine(),
        "title": o.title,
        "model": Path(o.model).name,
        **settings,
        "prompts": {"file": o.prompts.name, "count": len(prompts), "max_tokens": o.max_tokens},
        "draft_format": o.draft_format,
        "gguf": None if o.gguf is None else o.gguf.name,
        "repeat": o.repeat,
        "note": o.note,
        "ways": found,
    }
    o.out.parent.mkdir(parents=True, exist_ok=True)
    with o.out.open("a") as out:
        out.write(json.dumps(line) + "\n")
    plain_rate = found[0]["tokens_per_s"]
    for way in found:
        print(
            f"{way['label']:<60} {way['tokens_per_s']:7.2f} tok/s  x{way['speedup_mean']:.2f} of its plain (total "
            f"{way['speedup_total']:.2f}), {way['tokens_per_s'] / plain_rate:.2f} of ours, accepted "
            f"{way['acceptance_rate'] or 0:.2f}, equal {way['equal_texts']}/{len(prompts)}, "
            f"ttft x{way['ttft_ratio']:.2f}"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
