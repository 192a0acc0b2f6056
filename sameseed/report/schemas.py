"""Schemas: the required fields and types of the records that each measuring command writes."""

from __future__ import annotations

from collections.abc import Mapping

from sameseed.errors import ConfigError

BENCH_SCHEMA = "sameseed.bench/1"
PROFILE_SCHEMA = "sameseed.profile/1"
EVAL_SCHEMA = "sameseed.eval/1"
CERTIFICATE_SCHEMA = "sameseed.certificate/1"
LOAD_SCHEMA = "sameseed.load/1"
TUNE_SCHEMA = "sameseed.tune/1"
PEER_SCHEMA = "sameseed.peer/1"

_KINDS = {"text": str, "number": float, "count": int, "flag": bool, "object": dict, "list": list}
_ORIGIN = "text: schema commit, object: machine"
_MEASURED = f"{_ORIGIN}, text: time, object: config"
_RUN = f"{_MEASURED}, text: run"  # records of one command call share their `run`
COMMANDS = {BENCH_SCHEMA: "bench", PROFILE_SCHEMA: "profile", EVAL_SCHEMA: "eval", TUNE_SCHEMA: "regret"}
COMMANDS |= {CERTIFICATE_SCHEMA: "verify-lossless", LOAD_SCHEMA: "bench serve", PEER_SCHEMA: "study rivals"}
# By schema: the record's fields, as "KIND: NAME NAME, KIND: NAME"; "KIND?" allows null.
FIELDS = {
    BENCH_SCHEMA: f"{_RUN}, list: repetitions accepted_per_pos, number: tokens_per_s speedup overhead_ms_per_round, "
    "flag: equals_plain, object: latency_s ttft_s time_per_output_token_s time_split, count: rollbacks, number?: "
    "acceptance_rate mean_acceptance_length",
    PROFILE_SCHEMA: f"{_ORIGIN}, text: date backend, count: threads, flag: interleaved interrupted, object: limits "
    "shape, list: stored costs prefill batch, object?: draft",
    EVAL_SCHEMA: f"{_RUN}, object?: perplexity comparison, list: tasks",
    CERTIFICATE_SCHEMA: f"{_MEASURED}, number: effort false_alarm seconds, text: verdict, object: acceptance, list: "
    "checks left_out",
    LOAD_SCHEMA: f"{_RUN}, list: repetitions remarks, list?: same_texts, number: output_tokens_per_s "
    "goodput_requests_per_s, number?: speedup, object: ttft_ms tpot_ms itl_chunk_ms e2e_ms errors, object?: "
    "itl_token_ms acceptance, count: retries",
    TUNE_SCHEMA: f"{_MEASURED}, number: seconds, text: best, object: choice baselines errors, list: settings",
    PEER_SCHEMA: f"{_RUN}, text: engine, list: rows, object: missing",
}


def check(record: Mapping[str, object]) -> None:
    """Raise ConfigError naming the first field that is missing or of a wrong type."""
    given = record.get("schema")
    schema = given if isinstance(given, str) and given in FIELDS else BENCH_SCHEMA
    other = f"it was not written by `sameseed {COMMANDS[schema]}`"
    for kind, names in (part.split(": ") for part in FIELDS[schema].split(", ")):
        allowed = (_KINDS[kind.rstrip("?")], *([type(None)] if kind[-1] == "?" else []))
        for name in names.split():
            if name not in record:
                raise ConfigError(f"the record lacks {name!r}; {other}")
            if not isinstance(record[name], allowed):
                raise ConfigError(f"the record's {name!r} is {record[name]!r}; {other}")
    if schema != given:
        raise ConfigError(f"the record has schema {given!r}, this version reads {BENCH_SCHEMA!r}")
