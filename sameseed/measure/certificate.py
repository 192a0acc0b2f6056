"""The certificate: the results of all checks of one configuration as a record, in a few sentences, and as a page."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sameseed import devices, ops
from sameseed.config import EngineConfig, draft_text
from sameseed.engine.build import load_parts
from sameseed.errors import ConfigError, RequestError
from sameseed.fields import check_ranges, flag, within
from sameseed.laws import acceptance
from sameseed.laws.check import FAILED, IN_PART, NOT_SHOWN, PASSED, Check, Effort, Result, run_check
from sameseed.laws.checks import CHECKS, UNSEEN
from sameseed.laws.statistics import bound_text
from sameseed.laws.subject import Subject, storeless
from sameseed.measure.bench_report import SAMPLED
from sameseed.measure.workload import prompts_name, read_prompts, spec_as_dict, stored
from sameseed.models.weights import Progress
from sameseed.report import record
from sameseed.report.page import templates
from sameseed.report.schemas import CERTIFICATE_SCHEMA
from sameseed.request import SamplingParams

log = logging.getLogger("sameseed")
LEAST_CONTEXT = 128  # tokens: the longest requests of a check are prompts of 64 with 24 tokens and a draft after them
LEAST_TOKENS = 8  # least --max-tokens: the compared answers must leave room for drafts
Tick = Callable[[str, int, int], None]  # name of a check, number of checks done, number of checks


@dataclass(frozen=True)
class Asked:
    """What to certify, as given on the command line. Raises ConfigError for a number out of range."""

    model: str
    prompts: Path
    num_prompts: int | None = None
    max_tokens: int = within(32, LEAST_TOKENS)
    batch: int = within(8, 1)
    effort: Effort = field(default_factory=lambda: Effort.parse("quick"))

    def __post_init__(self) -> None:
        check_ranges(self, lambda name: flag(name) + {"max_tokens": ", to leave room for drafts,"}.get(name, ""))


@dataclass
class Certificate:
    """The results of all checks of one configuration."""

    results: list[Result]
    config: dict[str, object]
    effort: Effort
    acceptance: dict[str, int]
    seconds: float

    @property
    def left_out(self) -> list[str]:
        """Ids of the checks that were not run."""
        done = {r.check.id for r in self.results}
        return [c.id for c in CHECKS if c.id not in done]

    @property
    def passed(self) -> bool:
        """Did no check fail? A warning is no failure: it concerns speed."""
        return all(r.status != FAILED for r in self.results)

    @property
    def verdict(self) -> str:
        """passed, failed, not shown (too small a sample), or these checks passed (others were left out)."""
        if not self.passed:
            return FAILED
        if any(r.status == NOT_SHOWN for r in self.results):
            return NOT_SHOWN
        return IN_PART if self.left_out else PASSED

    def as_dict(self) -> dict[str, Any]:
        """The record, schema `sameseed.certificate/1`."""
        return {
            **record.origin(CERTIFICATE_SCHEMA),
            "config": self.config,
            "effort": self.effort.share,
            "verdict": self.verdict,
            "false_alarm": float(sum(r.found.false_alarm for r in self.results)),
            "seconds": round(self.seconds, 2),
            "acceptance": self.acceptance,
            "checks": [r.as_dict() for r in self.results],
            "left_out": self.left_out,
            "unseen": list(UNSEEN),
        }


def load_subject(
    asked: Asked, config: EngineConfig, params: SamplingParams, progress: Progress | None = None
) -> Subject:
    """Load models and prompts.

    `params`: settings of the sampled runs (others are greedy); its seed is the certificate's. Prompts
    that do not fit the context are left out. Raises ConfigError if nothing is drafted or an option is out of range,
    RequestError if no prompt fits.
    """
    if config.spec.method == "none" or config.spec.num_draft_tokens == 0:
        raise ConfigError("speculation is off, so there is nothing to certify; name a draft, e.g. --draft ngram")
    ops.resolve(config.backend, config.device)  # a missing backend or device is reported before anything is loaded
    prompts = read_prompts(asked.prompts, asked.num_prompts)
    loaded = load_parts(asked.model, config, progress)
    limit = config.max_model_len or loaded.target.max_model_len
    if limit < LEAST_CONTEXT:
        raise ConfigError(f"checks need {LEAST_CONTEXT} tokens of context or more, got {limit}; raise --max-model-len")
    encoded = [prompt.encode(loaded.tokenizer) for prompt in prompts]
    fitting = [tokens for tokens in encoded if tokens and len(tokens) + asked.max_tokens <= limit]
    if not fitting:
        raise RequestError(
            f"no prompt fits: with --max-tokens {asked.max_tokens} a prompt may have 1 to {limit - asked.max_tokens} "
            f"tokens, the shortest has {min(map(len, encoded))}; give shorter --prompts or a larger --max-model-len"
        )
    if len(fitting) < len(encoded):
        log.warning("%d of %d prompts fit the context; the others are left out", len(fitting), len(encoded))
    seed = 1 if params.seed is None else params.seed
    # Checks generate texts of many lengths: min_tokens must not exceed the shortest of them.
    least = min(params.min_tokens, LEAST_TOKENS)
    own = replace(params, max_tokens=asked.max_tokens, min_tokens=least, n=1, logprobs=None)
    subject = Subject(loaded, fitting, own, asked.max_tokens, asked.batch, seed)
    subject.digest = acceptance.weights_digest(subject)
    return subject


def certify(
    subject: Subject, asked: Asked, checks: Seq[Check] = CHECKS, tick: Tick = lambda name, done, total: None
) -> Certificate:
    """Run the checks. `tick` is called before each check."""
    start, results = time.perf_counter(), list[Result]()
    for i, check in enumerate(checks):
        tick(check.name, i, len(checks))
        results.append(run_check(check, subject, asked.effort))
    m = subject.metrics
    accepted = {
        **{name: getattr(m, name) for name in ("num_draft_tokens", "num_accepted_tokens", "num_rollbacks")},
        "num_scripted_tokens": subject.scripted.num_draft_tokens,
        "first_guesses": subject.first.num,
        "first_guesses_right": subject.first.hits,
        "first_guesses_accepted": subject.first.taken,
    }
    return Certificate(results, _config(subject, asked), asked.effort, accepted, time.perf_counter() - start)


def _config(subject: Subject, asked: Asked) -> dict[str, object]:
    """The resolved configuration (without "auto" values), for the record."""
    c, spec, params = subject.config, storeless(subject.config.spec), subject.params
    return {
        "label": f"{draft_text(spec)} k={spec.num_draft_tokens}",
        "model": record.model_name(asked.model),
        "model_digest": subject.digest,
        **stored(subject.target, c.format, subject.kv_format),
        **spec_as_dict(spec),
        "row_invariant": subject.target.ops.row_invariant,
        "device": c.device,
        "device_name": devices.title(c.device),
        "block_size": c.cache.block_size,
        "max_num_rows": c.max_num_rows,
        "batch": asked.batch,
        "prompts": prompts_name(asked.prompts),
        "num_prompts": len(subject.prompts),
        "max_tokens": asked.max_tokens,
        **{name: getattr(params, name) for name in SAMPLED[1:]},
        "seed": subject.seed,
    }


HEADLINES = {  # the page's, with their colours
    PASSED: ("Speculation changed nothing", "passed"),
    FAILED: ("Not lossless, or not provable", "failed"),
    NOT_SHOWN: ("Not shown: not enough evidence", "warning"),
    IN_PART: ("These checks passed; others were left out", "warning"),
}
OPENINGS = {  # first sentences of the summary
    PASSED: "Outputs with the draft equal those with speculation off, wherever this certificate looked.",
    FAILED: "Something differs, or a check broke down. The first differences stand below.",
    NOT_SHOWN: "Nothing differed, but there is not enough evidence. What to change stands below.",
    IN_PART: "Nothing differed in the checks that ran. Others were left out, so this is no proof of the whole.",
}
COMPARED = {  # by check: what it compared bit by bit, and the name of its count
    "L3": ("tokens", "greedy tokens"),
    "L6": ("texts", "sampled outputs"),
    "S1": ("requests", "requests that end early"),
}


def summary(record: Mapping[str, Any]) -> list[str]:
    """Sentences about a record (schema `sameseed.certificate/1`): verdict, what was checked, how much, what was not."""
    sizes = {c["id"]: {**c["sizes"], **c["statistic"]} for c in record["checks"]}
    lines, a = [OPENINGS[record["verdict"]]], record["acceptance"]
    if compared := [f"{sizes[c][n]:,.0f} {words}" for c, (n, words) in COMPARED.items() if n in sizes.get(c, {})]:
        lines.append(f"Generated with and without speculation, and compared bit by bit: {', '.join(compared)}.")
    if "exact" in (oracle := sizes.get("T1", {})):
        lines.append(
            f"{oracle['tokens']:,.0f} tokens were compared with a textbook decoder: "
            f"{oracle['exact']:,.0f} are its choice, {oracle['near_ties']:,.0f} too near to call, "
            f"{oracle['differing_tokens']:,.0f} wrong."
        )
    if "sequences" in sizes.get("L5", {}):
        lines.append(f"{sizes['L5']['sequences']:,.0f} short outputs were counted against their exact probabilities.")
    if a["num_draft_tokens"] or a["num_scripted_tokens"] or record["verdict"] != IN_PART:  # a check used a draft
        lines.append(
            f"The draft ({record['config']['label']}) proposed {a['num_draft_tokens']:,} tokens: "
            f"{a['num_accepted_tokens']:,} were accepted, and {a['num_rollbacks']:,} rounds rejected some. "
            f"{a['num_scripted_tokens']:,} tokens of trees made to provoke mistakes are not among them."
        )
    lines.append(f"Effort {record['effort']:g} (quick is 0.0005, full is 1){_shares(record, sizes)}.")
    if lacking := [c for c in record["checks"] if c["lacking"]]:
        short, remedies = (f"{c['id']} ({'; '.join(c['lacking'])})" for c in lacking), (c["remedy"] for c in lacking)
        lines.append(
            f"Not enough evidence: {', '.join(short)}. To change that, {'; or '.join(dict.fromkeys(remedies))}."
        )
    unseen = [*record["unseen"], *([f"the checks {', '.join(record['left_out'])}"] if record["left_out"] else [])]
    return [*lines, f"Not looked at: {'; '.join(unseen)}."]


def _shares(record: Mapping[str, Any], sizes: Mapping[str, Mapping[str, float]]) -> str:
    """How large the checks' samples are, as shares of the full sizes."""
    own = ((sizes[c["id"]], c["full_sizes"]) for c in record["checks"])
    each = [[seen[k] / n for k, n in full.items() if k in seen] for seen, full in own]
    if not (least := [min(1.0, *shares) for shares in each if shares]):
        return ""
    ends = " to ".join(dict.fromkeys(f"{100 * share:.3g} %" for share in (min(least), max(least))))
    return f": each check looked at {ends} of its full size. What is rarer than that may be missed"


def sizes_text(values: Mapping[str, float]) -> str:
    """Numbers with their names: "2,844 tokens, 72 texts"."""
    return ", ".join(f"{_number(v)} {name.replace('_', ' ')}" for name, v in values.items())


def statistic_text(values: Mapping[str, float]) -> str:
    """Names with their numbers: "differing texts: 0"."""
    return ", ".join(f"{name.replace('_', ' ')}: {_number(v)}" for name, v in values.items())


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}"


_TEMPLATES = templates(
    Path(__file__).parent, sizes=sizes_text, statistic=statistic_text, bound=bound_text, summary=summary
)


def render(record: Mapping[str, Any]) -> str:
    """The HTML page of a record (schema `sameseed.certificate/1`)."""
    status = [check["status"] for check in record["checks"]]
    counts = ", ".join(f"{status.count(s)} {s}" for s in ("passed", "failed", "warning", NOT_SHOWN) if s in status)
    config = record["config"]
    head, tone = HEADLINES[record["verdict"]]
    page, title = _TEMPLATES.get_template("certificate.html"), f"Certificate: {config['label']}"
    return page.render(head=head, tone=tone, title=title, r=record, c=config, counts=counts)
