"""/metrics: vLLM's names. The engine's counters continue when its process is restarted."""

from __future__ import annotations

import itertools
import time
from collections import Counter as Counts
from collections.abc import Iterator, Mapping, Sequence as Seq
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from sameseed.server import frames
from sameseed.server.client import EngineClient
from sameseed.server.gate import Gate

if TYPE_CHECKING:
    from sameseed.server.connection import Visit
    from sameseed.server.replies import Reply

PREFIX = "vllm:"
Kind = type[GaugeMetricFamily | CounterMetricFamily]
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_WHOLE = (0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 600.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000)
_CHOICES = (1, 2, 5, 10, 20)
_COUNTED = {
    "num_preemptions": ("preemptions", "preemptions of running sequences"),
    "prefix_cache_queries": ("prefix_queries", "tokens of sequences that started, looked up in the prefix cache"),
    "prefix_cache_hits": ("prefix_hits", "of these, tokens that were found there"),
    "spec_decode_num_drafts": ("drafts", "rounds with at least one draft token"),
    "spec_decode_num_draft_tokens": ("draft_tokens", "draft tokens"),
    "spec_decode_num_accepted_tokens": ("accepted_tokens", "draft tokens that were accepted"),
}
_COUNTED_BY = (
    ("spec_decode_num_accepted_tokens_per_pos", "accepted, by place", "position", "accepted_per_pos"),
    ("spec_decode_undrafted_rounds", "rounds without a draft, by why", "reason", "undrafted"),
    ("engine_time_seconds", "seconds of the engine, by stage", "stage", "times"),
)


class ServerMetrics(Collector):
    """The metrics that the server counts itself, and those that it collects from the engine's counters."""

    def __init__(self, client: EngineClient, gate: Gate, model_name: str) -> None:
        self.registry = CollectorRegistry()
        label = ("model_name",)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(PREFIX + name, text, (*label, *labels), registry=self.registry)

        def histogram(name: str, text: str, buckets: Seq[float]) -> Histogram:
            made = Histogram(PREFIX + name, text, label, buckets=buckets, registry=self.registry)
            return made.labels(model_name)

        self.prompt_tokens = counter("prompt_tokens", "tokens of prompts").labels(model_name)
        self.generation_tokens = counter("generation_tokens", "tokens written").labels(model_name)
        self._success = counter("request_success", "sequences that were completed, by why", "finished_reason")
        # Under the names without prefix that FastAPI dashboards read.
        by, text = ("handler", "method"), "requests, by route and status (499: the client left)"
        self._http = Counter("http_requests", text, (*by, "status"), registry=self.registry)
        name, text = "http_request_duration_seconds", "from arrival to the end, by route"
        self._seconds = Histogram(name, text, by, buckets=_WHOLE, registry=self.registry)
        self.first_token = histogram("time_to_first_token_seconds", "from arrival to the first token", _FIRST)
        self.between = histogram("inter_token_latency_seconds", "from one piece of a stream to the next", _BETWEEN)
        self.per_token = histogram("request_time_per_output_token_seconds", "of a request, but the first", _BETWEEN)
        self.whole = histogram("e2e_request_latency_seconds", "from arrival to the end", _WHOLE)
        self.queue = histogram("request_queue_time_seconds", "of a sequence, until it first ran", _FIRST)
        self.prefill = histogram("request_prefill_time_seconds", "from then to its first token", _FIRST)
        self.inference = histogram("request_inference_time_seconds", "from when it first ran to its last token", _WHOLE)
        self.decode = histogram("request_decode_time_seconds", "from its first token to its last", _WHOLE)
        self.prompts = histogram("request_prompt_tokens", "tokens of a request's prompts", _TOKENS)
        self.outputs = histogram("request_generation_tokens", "tokens that a request got", _TOKENS)
        self.longest = histogram("request_max_num_generation_tokens", "of its longest answer", _TOKENS)
        self.max_tokens = histogram("request_params_max_tokens", "tokens that a request may get", _TOKENS)
        self.num_answers = histogram("request_params_n", "answers that a request wants", _CHOICES)
        self._cached = counter("prompt_tokens_cached", "tokens of prompts that the prefix cache had").labels(model_name)
        self._model_name, self._client, self._gate = model_name, client, gate
        self.registry.register(self)

    def answered(self, visit: Visit, route: str, status: int) -> None:
        self._http.labels(route, visit.method, str(status)).inc()
        self._seconds.labels(route, visit.method).observe(time.monotonic() - visit.arrived)

    def ended(self, reply: Reply) -> None:
        """Count a request that has ended, complete or not: its tokens, and why its sequences ended."""
        self.generation_tokens.inc(reply.num_output_tokens)
        self.prompt_tokens.inc(reply.num_prompt_tokens)
        self._cached.inc(reply.num_cached_tokens)
        for choice in reply.choices:
            self._success.labels(self._model_name, choice.finish_reason or "abort").inc()
            if choice.completion is not None:  # where its time went, as the engine measured it
                m = choice.completion.metrics
                self.queue.observe(m.queue_time)
                self.prefill.observe(max(0.0, m.time_to_first_token - m.queue_time))
                self.decode.observe(max(0.0, m.total_time - m.time_to_first_token))
                self.inference.observe(max(0.0, m.total_time - m.queue_time))
        self.prompts.observe(reply.num_prompt_tokens)
        self.outputs.observe(reply.num_output_tokens)
        self.longest.observe(max(len(c.token_ids) for c in reply.choices))
        self.max_tokens.observe(reply.add.params.max_tokens)
        self.num_answers.observe(len(reply.choices) // len(reply.prompts))

    def collect(self) -> Iterator[Metric]:
        """The engine's counters, as of its last heartbeat."""
        now, gauge, counter = self._client.stats, GaugeMetricFamily, CounterMetricFamily
        everything = [*self._client.past_stats, now]
        blocks = now.get("num_blocks", 0)
        used = 1 - now.get("free_blocks", 0) / blocks if blocks else 0.0
        waiting, up = now.get("waiting", 0), float(self._client.state == "ready")
        restarts, refused = self._client.num_restarts, self._gate.num_refused
        yield self._family(gauge, "num_requests_running", "sequences in the engine's batch", now.get("running", 0))
        yield self._family(gauge, "num_requests_waiting", "sequences that wait for it", waiting)
        yield self._family(gauge, "kv_cache_usage_perc", "share of the cache's blocks that are taken, 0..1", used)
        yield self._family(gauge, "engine_up", "1 while an engine is loaded", up)
        # The engine never sleeps, and sequences wait only for capacity; vLLM's dashboards have panels for these.
        states = {state: float(state == "awake") for state in ("awake", "weights_offloaded", "discard_all")}
        yield self._family(gauge, "engine_sleep_state", "1: it is so", states, "sleep_state")
        reasons = {"capacity": waiting, "deferred": 0}
        yield self._family(gauge, "num_requests_waiting_by_reason", "", reasons, "reason")
        yield self._family(counter, "engine_restarts", "processes that replaced a dead one", restarts)
        yield self._family(counter, "admission_rejections", "requests refused by a full queue", refused)
        for name, (key, text) in _COUNTED.items():
            yield self._family(counter, name, text, sum(s.get(key, 0) for s in everything))
        yield self._passes(everything)
        text = "seconds of a pass by the tokens that it computes, as the length policy has them now"
        yield self._family(gauge, "pass_cost_seconds", text, now.get("pass_costs", {}), "rows")
        for name, text, label, key in _COUNTED_BY:
            sums: Counts[str] = Counts()
            for stats in everything:
                sums.update(stats.get(key, {}))
            yield self._family(counter, name, text, sums, label)

    def _family(self, kind: Kind, name: str, text: str, values: float | Mapping[str, float], label: str = "") -> Metric:
        labels = ["model_name", label] if label else ["model_name"]
        family = kind(PREFIX + name, text, labels=labels)
        for of, value in values.items() if isinstance(values, Mapping) else (("", values),):
            family.add_metric([self._model_name, of][: len(labels)], value)
        return family

    def _passes(self, everything: list[dict[str, Any]]) -> Metric:
        """Histogram of the engine's passes by the tokens that they computed; buckets by their upper bounds."""
        found = [s["passes"] for s in everything if "passes" in s]
        counts = [sum(p["counts"][i] for p in found) for i in range(len(frames.PASS_BOUNDS) + 1)]
        bounds = [*map(str, map(float, frames.PASS_BOUNDS)), "+Inf"]
        buckets = list(zip(bounds, itertools.accumulate(counts), strict=True))
        text = "tokens that a pass computed, drafted ones included"
        family = HistogramMetricFamily(PREFIX + "iteration_tokens_total", text, labels=["model_name"])
        family.add_metric([self._model_name], buckets, sum(p["tokens"] for p in found))
        return family
