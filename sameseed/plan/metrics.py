"""An engine's counters under common names: /metrics of sameseed, vLLM and llama-server, read or saved."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from sameseed import lines
from sameseed.errors import ConfigError


def _counter(*names: str) -> Any:
    """A counter, and its names after the engine's prefix, without Prometheus' _total."""
    return field(default=None, metadata={"counter": names})


def _gauge(*names: str) -> Any:
    return field(default=None, metadata={"gauge": names})


def _by(label: str, name: str) -> Any:
    """Counters of one name by the value of a label."""
    return field(default_factory=dict, metadata={"by": (name, label)})


@dataclass(frozen=True)
class Counted:
    """Counters at one moment, or their increase between two (seconds); gauges are means. None: not told."""

    engine: str
    drafts: float | None = _counter("spec_decode_num_drafts")  # rounds with a draft, of each sequence
    draft_tokens: float | None = _counter("spec_decode_num_draft_tokens")
    accepted: float | None = _counter("spec_decode_num_accepted_tokens")
    tokens: float | None = _counter("generation_tokens", "tokens_predicted")
    prompt_tokens: float | None = _counter("prompt_tokens")
    decode_seconds: float | None = _counter("tokens_predicted_seconds")
    requests: float | None = _counter("request_success")
    preemptions: float | None = _counter("num_preemptions")
    prefix_queries: float | None = _counter("prefix_cache_queries")
    prefix_hits: float | None = _counter("prefix_cache_hits")
    passes: float | None = _counter("iteration_tokens_total_count", "n_decode")
    gap_seconds: float | None = _counter("inter_token_latency_seconds_sum", "time_per_output_token_seconds_sum")
    gaps: float | None = _counter("inter_token_latency_seconds_count", "time_per_output_token_seconds_count")
    running: float | None = _gauge("num_requests_running", "requests_processing")
    cache_usage: float | None = _gauge("kv_cache_usage_perc")
    accepted_per_pos: Mapping[str, float] = _by("position", "spec_decode_num_accepted_tokens_per_pos")
    undrafted: Mapping[str, float] = _by("reason", "spec_decode_undrafted_rounds")
    stages: Mapping[str, float] = _by("stage", "engine_time_seconds")
    pass_costs: Mapping[str, float] = _by("rows", "pass_cost_seconds")  # current values, not an increase
    gap_buckets: Mapping[str, float] = _by("le", "inter_token_latency_seconds_bucket")
    seconds: float | None = None  # between the two moments

    def since(self, before: Counted, seconds: float) -> Counted:
        """The increase since `before`; a counter that fell, because the server restarted, counts from 0."""
        changes: dict[str, Any] = {"seconds": seconds}
        for name in COUNTERS:
            now, then = getattr(self, name), getattr(before, name)
            changes[name] = None if now is None else now - then if then is not None and then <= now else now
        for name in LABELLED.keys() - {"pass_costs"}:
            now, then = getattr(self, name), getattr(before, name)
            changes[name] = {k: v - (then[k] if then.get(k, v + 1) <= v else 0) for k, v in now.items()}
        return replace(self, **changes)


COUNTERS, GAUGES, LABELLED = (
    {f.name: f.metadata[kind] for f in fields(Counted) if kind in f.metadata} for kind in ("counter", "gauge", "by")
)


LOOKS = 10  # at the metrics of a server that is watched
PREFIXES = {"vllm": "vllm", "llamacpp": "llama.cpp"}  # engines by the prefix of their names


def read_text(text: str, where: str = "the metrics") -> Counted:
    """Counters of one moment from Prometheus text. Raises ConfigError for other text, or for an unknown engine."""
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ImportError:
        raise ConfigError("doctor reads Prometheus' text with prometheus-client: pip install '.[server]'") from None
    sums: dict[str, float] = {}
    labelled: dict[str, dict[str, float]] = {name: {} for name in LABELLED}
    prefixes = set()
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                prefix, colon, name = sample.name.rpartition(":")
                if not colon or name.endswith("_created"):
                    continue
                prefixes.add(prefix)
                name = name.removesuffix("_total")
                sums[name] = sums.get(name, 0.0) + sample.value
                for key, (own, label) in LABELLED.items():
                    if name == own and label in sample.labels:
                        at = sample.labels[label]
                        labelled[key][at] = labelled[key].get(at, 0.0) + sample.value
    except ValueError as error:
        raise ConfigError(
            f"{where}: this is no Prometheus text ({error}); give a server's address, or a saved page"
        ) from None
    engine = next((name for prefix, name in PREFIXES.items() if prefix in prefixes), None)
    # Our engine uses vLLM's names, and counts its stages; a server of ours in front of vLLM has none.
    if ("vllm" not in prefixes and "sameseed" in prefixes) or "engine_time_seconds" in sums:
        engine = "sameseed"
    if engine is None:
        raise ConfigError(
            f"{where}: no counters of an engine that is known (vllm:, sameseed:, llamacpp:); metrics must be on: "
            "--metrics of llama-server"
        )
    found = {key: next((sums[n] for n in names if n in sums), None) for key, names in {**COUNTERS, **GAUGES}.items()}
    return Counted(engine, **found, **labelled)  # type: ignore[arg-type]  # the names are the fields'


def fetch(url: str, timeout: float = 10.0, key: str | None = None) -> str:
    """The text of a server's /metrics. Raises ConfigError that says what to do."""
    page = url.rstrip("/").removesuffix("/v1").removesuffix("/metrics") + "/metrics"
    request = urllib.request.Request(page, headers={"Authorization": f"Bearer {key}"} if key else {})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=timeout) as answer:
            return str(answer.read().decode("utf-8", "replace"))
    except urllib.error.HTTPError as error:
        key_is_wrong = error.code in (401, 403)
        remedy = "give its key with --api-key-file" if key_is_wrong else "turn metrics on: --metrics of llama-server"
        raise ConfigError(f"{page} answered {error.code} ({error.reason}); {remedy}") from None
    except (OSError, ValueError) as error:
        why = getattr(error, "reason", error)
        raise ConfigError(f"no answer from {page} ({why}); is the server running, and is this its address?") from None


def watch(get: Callable[[], str], seconds: float, where: str, sleep: Callable[[float], object] = time.sleep) -> Counted:
    """Counters over the next `seconds`; gauges are means over `LOOKS` + 1 reads. Raises ConfigError without traffic."""
    start = time.perf_counter()
    seen = [read_text(get(), where)]
    for _ in range(LOOKS):
        sleep(seconds / LOOKS)
        seen.append(read_text(get(), where))
    found = seen[-1].since(seen[0], max(time.perf_counter() - start, 1e-9))
    if not found.tokens:
        late = " (llama-server counts an answer once it is whole)" if found.engine == "llama.cpp" else ""
        raise ConfigError(
            f"{where}: no token was written in {seconds:g} s{late}; send it the load that you want to know about while "
            "this runs, or give more --seconds"
        )
    values = {name: [v for s in seen if (v := getattr(s, name)) is not None] for name in GAUGES}
    means: dict[str, Any] = {name: sum(each) / len(each) if each else None for name, each in values.items()}
    return replace(found, **means)


def read_file(path: Path) -> Counted:
    """Counters from a saved page of metrics, which count since the server's start. Raises ConfigError."""
    remedy = "give a saved /metrics page, or a server's address, which begins with http://"
    found = read_text(lines.read_text(path, "metrics", remedy), str(path))
    if not found.tokens and not found.drafts:
        raise ConfigError(f"{path}: this server had written no token yet; save its /metrics after some load")
    return found
