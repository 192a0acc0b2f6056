"""Engine: the loop. It takes requests, runs one pass per step, and returns the decided tokens."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence as Seq
from dataclasses import replace

from sameseed.batch import MAX_NODES
from sameseed.cost.running import PromptCost
from sameseed.engine.alarm import Alarm
from sameseed.engine.policies import RequestPolicies
from sameseed.engine.running import OutputText, Running
from sameseed.engine.scheduler import Plan, Scheduler
from sameseed.errors import RequestError, reason
from sameseed.models.runner import ModelRunner
from sameseed.ops.reference import one_thread
from sameseed.request import (
    Delta,
    FinishReason,
    Request,
    SamplingParams,
    Sequence,
    SpecMetrics,
    TimeSplit,
    check_token_ids,
)
from sameseed.spec.draft import Draft
from sameseed.spec.drafter import Drafter, LengthPolicy, NoDrafter, Round
from sameseed.spec.step import NO_OVERLAP, NoOverlap, decode_step, forget
from sameseed.spec.verify import Verified
from sameseed.tokenizer import Tokenizer

log = logging.getLogger("sameseed")


class Engine:
    """One target with its drafter. Not thread-safe: only one thread may call it (in AsyncLLM its own thread)."""

    def __init__(
        self,
        runner: ModelRunner,
        drafter: Drafter,
        policies: RequestPolicies,
        tokenizer: Tokenizer,
        scheduler: Scheduler,
        ahead: NoOverlap = NO_OVERLAP,
        max_delay: float = math.inf,
    ) -> None:
        """`max_delay`: seconds that prompts may add to a pass while others stream their output."""
        self.runner = runner
        self.ahead = ahead  # what the drafter does while the target verifies
        self.drafter = drafter
        self._policies = policies
        self._wanted: dict[int, int] = {}  # by sequence: draft tokens that the policy wants in this round
        self._crowded = False  # did the policy want all draft tokens that there was room for?
        self.tokenizer = tokenizer
        self.scheduler = scheduler
        self.max_model_len = scheduler.max_model_len
        self._prompt_cost = PromptCost(max_delay)
        self.times = TimeSplit()  # of all steps so far
        self.metrics = SpecMetrics()
        self.num_rows = 0  # rows of the last pass, draft tokens included
        self.alarm = Alarm()
        self._eos = frozenset(runner.model.config.eos_token_ids)
        self._live: dict[int, Running] = {}
        self._pass: list[Sequence] = []  # sequences of the current step
        self._undelivered: list[tuple[Running, int]] = []  # sequences, and how many of their latest tokens
        self._num_added = 0
        self._tail = 0.0  # seconds of the last step after its pass
        self._ended, self._went_on = 0.0, False  # when the last step ended, and whether there was more work

    def check(self, prompt_token_ids: tuple[int, ...], params: SamplingParams | None = None) -> None:
        """Raise RequestError if this prompt cannot be served, or not with these parameters."""
        if not prompt_token_ids:
            raise RequestError("the prompt is empty; give at least one token of text")
        if len(prompt_token_ids) >= self.max_model_len:
            raise RequestError(
                f"the prompt has {len(prompt_token_ids)} tokens and the context holds {self.max_model_len}, one of "
                "them at least for the answer; shorten the prompt"
            )
        width = self.runner.model.config.vocab_size
        check_token_ids("prompt", prompt_token_ids, width)
        if params is not None:
            params.check(width, self.max_model_len)

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestError if it cannot be served."""
        params = request.params
        self.check(request.prompt_token_ids, params)
        if suppressed := self.runner.model.config.suppress_tokens:
            params = replace(params, banned_token_ids=(*params.banned_token_ids, *suppressed))
        seq = Sequence(self._num_added, request.prompt_token_ids, params, request.seed, request.tenant)
        seq.speculation, seq.grammar = request.speculation, request.grammar
        seq.priority, seq.owner = request.priority, request.owner
        seq.max_delay = self._prompt_cost.limit if request.streamed else math.inf
        seq.metrics.rounds = [] if request.detailed else None
        if request.score_prompt:  # to score it, the rest of the prompt becomes a draft that is always accepted
            seq.script = request.prompt_token_ids
            del seq.token_ids[1:]
        self._num_added += 1
        output = OutputText(self.tokenizer, params.stop, params.skip_special_tokens, request.prompt_token_ids)
        self._live[seq.seq_id] = Running(request, seq, output, self._eos, time.perf_counter())
        self.scheduler.add(seq)

    @property
    def level_names(self) -> tuple[str, ...]:
        """The drafter's levels, the lowest first, with unique names: a second "cascade" is "cascade 2"."""
        names = self.drafter.level_names
        counts = [names[: i + 1].count(name) for i, name in enumerate(names)]
        return tuple(name if n == 1 else f"{name} {n}" for name, n in zip(names, counts, strict=True))

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def abort(self, request_id: str) -> list[Delta]:
        """End every sequence of a request now; its blocks are free when this returns. Unknown ids do nothing."""
        live = [r for r in self._live.values() if r.request.request_id == request_id]
        for r in live:
            if r.seq in self._pass:  # a step that raised
                self.scheduler.blocks.forget(r.seq)
        return self._deliver(live) + [self._finish(r, FinishReason.ABORT) for r in live]

    def step(self, send: Callable[[list[Delta]], None] | None = None) -> list[Delta]:
        """Run one pass. Returns a Delta for each sequence with something to give out.

        On a GPU the texts of a step are made during the next step's pass. These Deltas go to `send` at once, if given;
        else the next step returns them too.
        """
        start = time.perf_counter()
        self.num_rows = 0
        plan = self.scheduler.schedule(self._lengths, self._prompt_cost.seconds)
        if not plan.seqs:
            return self._deliver()
        self._pass = plan.seqs
        for seq in plan.seqs:
            live = self._live[seq.seq_id]
            live.started = start if live.started is None else live.started
        times = TimeSplit(schedule=time.perf_counter() - start)
        scripted = [seq.num_scripted > 0 for seq in plan.seqs]
        earlier: list[Delta] = []

        def deliver() -> None:
            if self._undelivered:
                (send or earlier.extend)(self._deliver())

        with one_thread():  # PyTorch's other threads would spin on the cores that the kernels need
            draft, result = decode_step(
                self.runner,
                self.drafter,
                plan.seqs,
                plan.num_pending,
                plan.num_draft,
                times,
                self._policies,
                self.ahead,
                captured=not self.runner.captures or self._policies.listens(plan.seqs),
                meanwhile=deliver,
            )
        decided = time.perf_counter()
        self.num_rows = sum(plan.num_pending) + len(draft.tokens)
        if self.num_rows - len(draft.tokens) > len(plan.seqs):
            pairs = zip(plan.seqs, plan.num_pending, strict=True)
            self._prompt_cost.learn([(n, seq.num_cached - n) for seq, n in pairs if n > 1], times.target)
        elif not any(scripted):
            self._prompt_cost.passed(times.target)
        if not self._policies.pass_over():
            between = start - self._ended if self._went_on else 0.0  # the caller's time, e.g. to send tokens
            whole = replace(times, schedule=times.schedule + self._tail + min(between, self._tail + times.target))
            free, every = [b for b, known in enumerate(scripted) if not known], draft.counts
            seqs, asked = [plan.seqs[b] for b in free], [plan.num_draft[b] for b in free]
            counts, nodes = [every[b] for b in free], [result.nodes[b] for b in free]
            accepted = [len(n) for n in nodes]
            self._policies.update(Round(seqs, asked, counts, accepted, self.num_rows, whole, nodes))
            if any(counts):
                self.alarm.update(self.drafter, counts, accepted)
        deltas = earlier + self._take(plan, draft, result, decided, scripted)
        if not self.runner.takes_late:  # the pass keeps the host busy, or its tokens are needed first
            deltas += self._deliver()
        self._tail = time.perf_counter() - decided
        times.schedule += self._tail
        self.times.add(times)
        for seq in plan.seqs:
            seq.times.add(times, 1.0 / len(plan.seqs))
        self._pass = []
        self._ended, self._went_on = time.perf_counter(), self.has_work
        return deltas

    def fail_step(self, error: Exception) -> list[Delta]:
        """Call this after a step that raised. Ends the sequences of that step with this error; the others go on."""
        failed, self._pass = self._pass, []
        for seq in failed:
            seq.error = f"a step of the engine failed: {reason(error)}"
        live = [self._live[seq.seq_id] for seq in failed if seq.seq_id in self._live]
        return self._deliver() + [self._finish(r, FinishReason.ERROR) for r in live]

    @property
    def policy(self) -> LengthPolicy:
        """The length policy of requests without their own; it also decides when the drafter ends drafts."""
        return self._policies.default

    @policy.setter
    def policy(self, policy: LengthPolicy) -> None:
        self._policies.default = policy

    @property
    def pass_costs(self) -> dict[str, float]:
        """Current seconds of the target's passes, by their rows; {} if the length policy measures no costs."""
        curve = getattr(getattr(self.policy, "cost", self.policy), "target", None)
        return {} if curve is None else {f"{m:g}": s for m, s in zip(curve.rows, curve.seconds, strict=True)}

    def _lengths(self, seqs: Seq[Sequence], num_rows: int, budget: int) -> list[int]:
        free, beside = [seq for seq in seqs if not seq.num_scripted], len(self.scheduler.running) - len(seqs)
        chosen = iter(self._policies.lengths(free, num_rows, budget, beside))
        # One token less than are left: the pass itself decides the last one, so that no free choice follows it.
        lengths = [min(s.num_scripted - 1, MAX_NODES) if s.num_scripted else next(chosen) for s in seqs]
        self._wanted = {seq.seq_id: k for seq, k in zip(seqs, lengths, strict=True)}
        self._crowded = sum(lengths) >= budget
        if not self.drafter.branches:
            lengths = [min(k, seq.draft_depth) for seq, k in zip(seqs, lengths, strict=True)]
        return lengths

    def _why_undrafted(self, seq: Sequence, num_draft: int, num_known: int) -> str:
        """Why a sequence had no draft in its latest round; `num_known`: its tokens when the round began."""
        if num_draft and self.drafter.limit is not None and num_known >= self.drafter.limit:
            return "draft context"
        wanted = self._wanted.get(seq.seq_id)
        if wanted is None:
            return "prompt"
        if isinstance(self.drafter, NoDrafter):
            return "no drafter"
        if wanted and not num_draft:
            return "last token" if len(seq) >= seq.max_len else "no room"
        if num_draft and seq.num_unread:
            return "catching up"
        why = self._policies.why_none(seq, num_draft)
        return "no room" if why == "cost" and not num_draft and self._crowded else why

    def _take(self, plan: Plan, draft: Draft, result: Verified, now: float, scripted: Seq[bool]) -> list[Delta]:
        """Take the decided tokens of each sequence, up to the first that ends it; the Deltas of those that ended."""
        deltas: list[Delta] = []
        names, counts = self.level_names if len(draft.tokens) else (), draft.counts
        for b, seq in enumerate(plan.seqs):
            live, tokens, num_accepted = self._live[seq.seq_id], result.tokens[b], len(result.nodes[b])
            if not result.failed[b]:
                self.scheduler.blocks.enter(seq, seq.num_cached)
            if not tokens and not result.failed[b]:
                continue  # a chunk of a prompt
            if scripted[b]:
                seq.prompt_logprobs += result.logprobs[b]
                if result.failed[b]:
                    deltas.append(self._finish(live, FinishReason.ERROR))
                else:
                    self._undelivered.append((live, 0))
                continue
            held = self.ahead.outcome(b, draft, result)
            for metrics in (seq.metrics, self.metrics):
                metrics.update(counts[b], num_accepted, held)
            if not counts[b]:
                cause = self._why_undrafted(seq, plan.num_draft[b], len(seq) - len(tokens))
                for metrics in (seq.metrics, self.metrics):
                    metrics.undrafted[cause] = metrics.undrafted.get(cause, 0) + 1
            if live.first_token is None:
                live.first_token = now
            taken, why = live.take(tokens)
            if result.failed[b]:
                if why is None:
                    why = FinishReason.ERROR
                else:  # beyond the end of the text
                    seq.error, seq.ruled_out = "", False
            by = draft.node_levels(b) if num_accepted else []
            live.levels += [*(names[by[node]] for node in result.nodes[b]), None][:taken]
            seq.logprobs += result.logprobs[b][:taken]
            if why is not None:
                deltas.append(self._finish(live, why, taken))
                continue
            self.scheduler.blocks.trim(seq, len(seq))
            self._undelivered.append((live, taken))
        return deltas

    def _deliver(self, only: Seq[Running] | None = None) -> list[Delta]:
        """Make the texts of the undelivered tokens, of all sequences or of `only`; the Deltas of streamed ones."""
        undelivered, self._undelivered = self._undelivered, []
        deltas: list[Delta] = []
        for live, taken in undelivered:
            if only is not None and all(live is not r for r in only):
                self._undelivered.append((live, taken))
                continue
            live.write()
            if live.request.streamed:
                deltas.append(live.delta(taken))
        return deltas

    def _finish(self, live: Running, why: FinishReason, num_tokens: int = 0) -> Delta:
        """End a sequence; its last `num_tokens` tokens have not been given out."""
        seq = live.seq
        if why is FinishReason.ERROR:
            self.scheduler.blocks.forget(seq)
            id, level = live.request.request_id, logging.WARNING if seq.ruled_out else logging.ERROR
            log.log(level, "request %s failed: %s", id, seq.error, extra={"request_id": id})
        self.scheduler.finish(seq)
        forget(self.drafter, seq)
        self._policies.release(seq)
        del self._live[seq.seq_id]
        completion = live.complete(why)
        return live.delta(num_tokens, completion)
