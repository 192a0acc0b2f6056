"""What a user asks for (Request, SamplingParams), how it runs (Sequence), and the result (Completion). Pure Python."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence as Seq
from dataclasses import InitVar, asdict, dataclass, field
from enum import Enum
from functools import wraps
from itertools import zip_longest
from typing import Any, NoReturn, Protocol, TypeVar

from sameseed import fields, habits
from sameseed.errors import RequestError
from sameseed.fields import LARGEST, setting, within

MAX_SEED = 2**63 - 1
MAX_CONTEXT = 2**31 - 1  # tokens, unless a model has a smaller limit


T = TypeVar("T")


def _in_any_words(cls: type[T]) -> type[T]:
    """Class decorator: the dataclass also accepts keyword names of other libraries. Raises RequestError."""
    init: Any = cls.__init__
    known = fields.hints(cls)

    @wraps(init)
    def translated(self: T, *args: Any, **given: Any) -> None:
        given = habits.sampling({k: getattr(v, "tolist", lambda v=v: v)() for k, v in given.items()})  # also of NumPy
        fields.check_keys(given, known, error=RequestError)
        init(self, *args, **given)

    cls.__init__ = translated  # type: ignore[assignment, method-assign]
    return cls


@_in_any_words
@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen. The defaults are greedy decoding of at most 128 tokens.

    Of `n` completions the first uses the seed itself, the others use seeds derived from it. Log-probabilities are those
    of the processed distribution. Raises RequestError for a value out of range.
    """

    max_tokens: int = within(128, 1, help="longest answer in tokens")
    min_tokens: int = within(0, 0, help="no end before this many tokens")
    temperature: float = within(0.0, 0, LARGEST, help="0 is greedy; higher is more varied")
    top_k: int = within(0, -1, 2**31 - 1, help="sample from the k likeliest tokens only; 0 is off")
    top_p: float = within(1.0, 0, 1, True, "sample from the likeliest tokens that make up this probability")
    min_p: float = within(0.0, 0, 1, help="drop tokens below this share of the likeliest one's probability")
    repetition_penalty: float = within(1.0, 0, LARGEST, True, "above 1 discourages tokens of the text so far")
    presence_penalty: float = within(0.0, -2, 2, help="subtracted from the logit of every token written before")
    frequency_penalty: float = within(0.0, -2, 2, help="subtracted from a token's logit for each earlier occurrence")
    logit_bias: Mapping[int, float] = field(
        default_factory=dict, hash=False, metadata={"help": "TOKEN=BIAS, added to a logit"}
    )
    allowed_token_ids: tuple[int, ...] | None = setting(None, "a token id that may be written; if given, no other may")
    banned_token_ids: tuple[int, ...] = setting((), "a token id that is never written")
    stop: tuple[str, ...] = setting((), "text that ends the answer; not part of it")
    stop_token_ids: tuple[int, ...] = setting((), "a token id that ends the answer")
    ignore_eos: bool = setting(False, "continue past the model's end token")
    n: int = within(1, 1, 128, help="completions of one prompt")
    seed: int | None = within(
        None, 0, MAX_SEED, help="the same seed, the same text; unset: a fresh one, which is shown"
    )
    logprobs: int | None = within(None, 0, 100, help="log-probabilities, also of so many likeliest tokens (--json)")
    skip_special_tokens: bool = setting(True, "leave special tokens out of the text")

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids", "banned_token_ids", "logit_bias"):
            if getattr(self, name) is None:  # as in other libraries
                object.__setattr__(self, name, {} if name == "logit_bias" else ())
        fields.check(self, RequestError)
        if self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens must be at most max_tokens, {self.max_tokens}, got {self.min_tokens}")
        for name in ("logit_bias", "allowed_token_ids", "banned_token_ids", "stop_token_ids"):
            if any(token < 0 for token in getattr(self, name) or ()):
                raise RequestError(f"{name}: a token is a whole number, at least 0")
        if any(not bias <= LARGEST for bias in self.logit_bias.values()):
            raise RequestError("logit_bias: a bias is a number, or -inf")
        if self.allowed_token_ids is not None and not set(self.allowed_token_ids) - set(self.banned_token_ids):
            raise RequestError("allowed_token_ids leaves no token that is not banned; allow at least one")
        if not all(self.stop):
            raise RequestError("stop strings must be non-empty text; drop the empty ones")

    def check(self, vocab_size: int, max_model_len: int) -> None:
        """Raise RequestError for what this model cannot do: token ids beyond its vocabulary, texts beyond its context.

        The default of `max_tokens` fits every context: there the text ends.
        """
        for name in ("logit_bias", "allowed_token_ids", "banned_token_ids", "stop_token_ids"):
            check_token_ids(name, getattr(self, name) or (), vocab_size)
        if self.max_tokens > max(max_model_len, SamplingParams.max_tokens):
            raise RequestError(
                f"This model's maximum context length is {max_model_len} tokens; ask for at most as many", "max_tokens"
            )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def ending(self, eos_token_ids: Iterable[int]) -> set[int]:
        """The tokens that end a text; `eos_token_ids`: those of the model."""
        return {*self.stop_token_ids, *(() if self.ignore_eos else eos_token_ids)}


def check_token_ids(name: str, token_ids: Collection[int], vocab_size: int) -> None:
    """Raise RequestError for token ids that the model does not have."""
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        raise RequestError(f"{name}: token ids must lie in 0..{vocab_size - 1}, the model's vocabulary", name)


SPECULATION_POLICIES = ("off", "fixed", "history", "disco", "goodput")


@dataclass(frozen=True)
class Speculation:
    """How to draft for a request: a policy (one of SPECULATION_POLICIES; None: the engine's), most tokens per round."""

    policy: str | None = None
    num_draft_tokens: int | None = within(None, 0, 64)

    def __post_init__(self) -> None:
        fields.check(self, RequestError)
        if self.policy is not None and self.policy not in SPECULATION_POLICIES:
            raise RequestError(f"speculation must be one of {', '.join(SPECULATION_POLICIES)}, got {self.policy!r}")

    def of(self, length: int) -> int:
        """The request's draft length, if its policy decides on `length`."""
        if self.policy == "off":
            return 0
        if self.num_draft_tokens is None:
            return length
        return self.num_draft_tokens if self.policy == "fixed" else min(length, self.num_draft_tokens)


class Grammar(Protocol):
    """A constraint on a text, token by token."""

    def allowed(self, output: Seq[int], path: Seq[int]) -> Any:
        """bool [V]: the tokens that may come after the output's tokens and then the draft tokens `path`.

        The result must depend on these two arguments only, so that draft tokens have no lasting effect.
        """

    def another(self) -> Grammar:
        """The same grammar for another user of the text, e.g. a drafter, which may run in another thread."""


@dataclass(frozen=True)
class Request:
    """One prompt with its parameters, as the engine takes it."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    index: int = 0  # counts the completions of `n`
    prompt: str | None = None
    tenant: str = ""  # whose data this is: what is kept of its texts serves no other, unless that is asked for
    owner: str = ""  # who sent it: if not all can run at once, owners get equal shares, however many requests each has
    speculation: Speculation | None = None
    score_prompt: bool = False  # return log-probabilities of the prompt's tokens too (with `params.logprobs`)
    grammar: Grammar | None = None
    priority: int = 0  # if not all can run at once, lower values go first, but no request waits forever
    detailed: bool = False  # metrics list every draft
    streamed: bool = True  # tokens are given out as they are decided, not only at the end


class FinishReason(str, Enum):
    """Why a sequence ended, with OpenAI's names where OpenAI has one."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"

    __str__ = str.__str__


@dataclass
class TimeSplit:
    """Seconds of wall time by stage. A sequence's share of a step is the step's time divided by its sequences."""

    draft: float = 0.0
    target: float = 0.0
    verify: float = 0.0
    schedule: float = 0.0

    @property
    def whole(self) -> float:
        """Seconds of all stages."""
        return self.draft + self.target + self.verify + self.schedule

    def add(self, other: TimeSplit, share: float = 1.0) -> None:
        for stage, seconds in vars(other).items():
            setattr(self, stage, getattr(self, stage) + seconds * share)


@dataclass
class SpecMetrics:
    """Counters of speculation for one sequence or for a whole run (named as in vLLM)."""

    num_rounds: int = 0  # passes of the target that decided tokens
    num_drafts: int = 0  # rounds with at least one drafted token
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)
    num_rollbacks: int = 0  # rounds with at least one rejected token
    undrafted: dict[str, int] = field(default_factory=dict)  # rounds without a draft, by reason
    num_ahead: int = 0  # rounds in which the drafter drafted ahead while the target verified
    num_ahead_kept: int = 0  # those of them whose ahead draft was usable: the text went on as it assumed
    rounds: list[tuple[int, int]] | None = None  # drafted and accepted tokens of each draft, if recorded

    def update(self, num_draft: int, num_accepted: int, ahead: bool | None = None) -> None:
        """Count one round with `num_draft` draft tokens, `num_accepted` of which (a path) were accepted.

        `ahead`: None if the drafter waited, else whether the tokens that it drafted ahead are usable.
        """
        self.num_rounds += 1
        self.num_ahead += ahead is not None
        self.num_ahead_kept += bool(ahead)
        if num_draft == 0:
            return
        if self.rounds is not None:
            self.rounds.append((num_draft, num_accepted))
        self.num_drafts += 1
        self.num_draft_tokens += num_draft
        self.num_accepted_tokens += num_accepted
        self.num_rollbacks += num_accepted < num_draft
        pairs = zip_longest(self.num_accepted_tokens_per_pos, [1] * num_accepted, fillvalue=0)
        self.num_accepted_tokens_per_pos = [before + new for before, new in pairs]

    def add(self, other: SpecMetrics) -> None:
        for name in COUNTERS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for why, count in other.undrafted.items():
            self.undrafted[why] = self.undrafted.get(why, 0) + count
        pairs = zip_longest(self.num_accepted_tokens_per_pos, other.num_accepted_tokens_per_pos, fillvalue=0)
        self.num_accepted_tokens_per_pos = [mine + its for mine, its in pairs]

    def since(self, other: SpecMetrics) -> SpecMetrics:
        """What was counted after `other`, an earlier copy of these counters."""
        mine, its, reasons = self.num_accepted_tokens_per_pos, other.num_accepted_tokens_per_pos, self.undrafted.items()
        return SpecMetrics(
            **{name: getattr(self, name) - getattr(other, name) for name in COUNTERS},
            num_accepted_tokens_per_pos=[n - (its[i] if i < len(its) else 0) for i, n in enumerate(mine)],
            undrafted={why: n - before for why, n in reasons if n > (before := other.undrafted.get(why, 0))},
            rounds=None if self.rounds is None else self.rounds[len(other.rounds or ()) :],
        )

    def copy(self) -> SpecMetrics:
        return self.since(SpecMetrics())

    def as_dict(self) -> dict[str, object]:
        """Plain data for JSON, with the usual metrics of speculative decoding added."""
        found = asdict(self)
        rounds = found.pop("rounds")
        found |= {"acceptance_rate": self.acceptance_rate, "mean_acceptance_length": self.mean_acceptance_length}
        return found if rounds is None else found | {"rounds": [list(r) for r in rounds]}

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over drafted tokens; None if nothing was drafted."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    def mean_acceptance_length(self) -> float | None:
        """1 + accepted tokens per draft (the bonus token counts); None if nothing was drafted."""
        return 1.0 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else None


COUNTERS = [f.name for f in dataclasses.fields(SpecMetrics) if isinstance(f.default, int)]  # plain sums


@dataclass(slots=True, eq=False, repr=False)
class Sequence:
    """A running request. `token_ids` are known so far; keys and values of the first `num_cached` are in the cache.

    The other tokens are pending. There are no phases: a prompt is many pending tokens, decoding is one.
    """

    seq_id: int
    known: InitVar[Seq[int]]
    params: SamplingParams
    seed: int
    tenant: str = ""
    token_ids: list[int] = field(init=False)
    num_prompt: int = field(init=False)
    speculation: Speculation | None = None
    num_cached: int = 0
    context: int = MAX_CONTEXT  # most tokens that the model can take; set by what runs the sequence
    blocks: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)  # prefix digests of its text, one per full block
    slot: int = -1  # of its recurrent state (kvcache/state.py); -1: it has none
    num_settled: int = 0  # its first tokens that the stored state covers
    num_certain: int | None = None  # tokens from here on may be taken back; None: no token is
    num_known: int = 0  # its first blocks that are in the prefix table, so that others may find them
    num_shared: int = 0  # tokens whose rows were found in the prefix cache
    priority: int = 0  # lower goes first
    owner: str = ""  # within a priority, scheduling is fair between owners
    num_unread: int = 0  # tokens that the drafter must read before it drafts, as of the last round with a draft wanted
    max_delay: float = math.inf  # seconds by which others' prompts may delay its next token; inf: nobody reads along
    metrics: SpecMetrics = field(default_factory=SpecMetrics)
    times: TimeSplit = field(default_factory=TimeSplit)
    num_preemptions: int = 0
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    grammar: Grammar | None = None
    ruled_out: bool = False  # did it fail because its request's own constraints left no token?
    error: str = ""  # why it failed
    script: Seq[int] = ()  # tokens that are decided already, from the first on, and are to be scored
    state: object = None  # the sampler's state between rounds (penalty counts); derived data that may be dropped

    def __post_init__(self, known: Seq[int]) -> None:
        self.token_ids = list(known)
        self.num_prompt = len(self.token_ids)

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_pending(self) -> int:
        return len(self.token_ids) - self.num_cached

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt :]

    @property
    def num_output(self) -> int:
        """Tokens written so far; below 0 while tokens of the prompt are still to be scored."""
        return len(self.token_ids) - self.num_prompt

    @property
    def num_scripted(self) -> int:
        """Number of next tokens that are decided already."""
        return max(0, len(self.script) - len(self.token_ids))

    @property
    def draft_depth(self) -> int:
        """The longest useful path of a draft: one token less than may still be written."""
        return max(0, self.max_len - len(self.token_ids) - 1)

    @property
    def max_len(self) -> int:
        """The most tokens that the sequence may have."""
        return min(self.num_prompt + self.params.max_tokens, self.context)


@dataclass(frozen=True)
class TokenLogprob(habits.Hinted):
    """Log-probability of a chosen token, and the likeliest alternatives as (token, logprob), best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Metrics:
    """Costs of one completion. Times are in seconds; `time_split` sums to the sequence's share of the engine's time."""

    num_prompt_tokens: int
    num_output_tokens: int
    spec: SpecMetrics
    time_split: TimeSplit
    time_to_first_token: float
    time_per_output_token: float
    total_time: float
    num_preemptions: int = 0
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache
    queue_time: float = 0.0  # from arrival until it first ran

    def as_dict(self) -> dict[str, object]:
        times = ("time_to_first_token", "time_per_output_token", "total_time", "queue_time")
        return {
            **{name: getattr(self, name) for name in ("num_prompt_tokens", "num_cached_tokens", "num_output_tokens")},
            **self.spec.as_dict(),
            **{f"{name}_s": getattr(self, name) for name in times},
            "num_preemptions": self.num_preemptions,
            "time_split_s": asdict(self.time_split),
        }


@dataclass(frozen=True)
class Completion(habits.Hinted):
    """One finished text; `seed` reproduces it."""

    request_id: str
    index: int
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    seed: int
    metrics: Metrics
    levels: tuple[str | None, ...]  # for each token the drafter's level that first drafted it; None: the target's own
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None  # of all prompt tokens but the first
    text_offset: tuple[int, ...] = ()  # for each token the character of the text at which it begins
    ruled_out: bool = False  # did it fail because the request's own constraints left no token?
    error: str = ""  # why it failed, if finish_reason is "error"
    n: int = 1  # completions that the request asked for
    finished = True

    @property
    def outputs(self) -> tuple[Completion, ...]:
        """A tuple of this completion, where vLLM has a list of completions. Raises RequestError with n above 1."""
        if self.n > 1:
            raise RequestError(f"n={self.n}: generate gives one flat list; of prompt i it is done[i * n : (i + 1) * n]")
        return (self,)

    def __getitem__(self, key: object) -> NoReturn:
        """Raise RequestError: a completion is neither a list nor a dict."""
        raise RequestError(f"this is one completion, so leave out [{key!r}]; its text is .text")

    @property
    def accepted(self) -> tuple[bool, ...]:
        """For each token, whether it is an accepted draft token."""
        return tuple(level is not None for level in self.levels)


@dataclass(frozen=True)
class SoFar:
    """All output of a completion up to some step. Text that may still become a stop string is left out."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None


@dataclass(frozen=True)
class Delta:
    """What one engine step added to a request: new text (may be empty), new tokens, and the completion at the end."""

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...]
    levels: tuple[str | None, ...]
    completion: Completion | None = None
    logprobs: tuple[TokenLogprob, ...] = ()  # of these tokens, if asked for
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # with the first tokens, if asked for
    text_offset: tuple[int, ...] = ()
    so_far: Callable[[], tuple[str, tuple[int, ...]]] = field(default=lambda: ("", ()), repr=False, compare=False)

    @property
    def finished(self) -> bool:
        return self.completion is not None

    @property
    def outputs(self) -> tuple[SoFar]:
        """All text and tokens so far, as vLLM streams them."""
        reason = None if self.completion is None else self.completion.finish_reason
        return (SoFar(self.index, *self.so_far(), reason),)

    @property
    def accepted(self) -> tuple[bool, ...]:
        return tuple(level is not None for level in self.levels)
