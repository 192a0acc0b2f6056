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
# By schema: the command that writes the record, and its fields, as "KIND: NAME NAME, KIND: NAME"; "KIND?" allows null.
FIELDS = {
    BENCH_SCHEMA: (
        "bench",
        f"{_RUN}, list: repetitions accepted_per_pos, number: tokens_per_s speedup overhead_ms_per_round, flag: "
        "equals_plain, object: latency_s ttft_s time_per_output_token_s time_split, count: rollbacks, number?: "
        "acceptance_rate mean_acceptance_length",
    ),
    PROFILE_SCHEMA: (
        "profile",
        f"{_ORIGIN}, text: date backend, count: threads, flag: interleaved interrupted, object: limits shape, list: "
        "stored costs prefill batch, object?: draft",
    ),
    EVAL_SCHEMA: ("eval", f"{_RUN}, object?: perplexity comparison, list: tasks"),
    CERTIFICATE_SCHEMA: (
        "verify-lossless",
        f"{_MEASURED}, number: effort false_alarm seconds, text: verdict, object: acceptance, list: checks left_out",
    ),
    LOAD_SCHEMA: (
        "bench serve",
        f"{_RUN}, list: repetitions remarks, list?: same_texts, number: output_tokens_per_s goodput_requests_per_s, "
        "number?: speedup, object: ttft_ms tpot_ms itl_chunk_ms e2e_ms errors, object?: itl_token_ms acceptance, "
        "count: retries",
    ),
    TUNE_SCHEMA: (
        "regret",
        f"{_MEASURED}, number: seconds, text: best, object: choice baselines errors, list: settings",
    ),
    PEER_SCHEMA: ("study rivals", f"{_RUN}, text: engine, list: rows, object: missing"),
}


def check(record: Mapping[str, object]) -> None:
    """Raise ConfigError naming the first field that is missing or of a wrong type."""
    schema = record.get("schema")
    command, said = FIELDS.get(schema if isinstance(schema, str) else "", FIELDS[BENCH_SCHEMA])
    for kind, names in (part.split(": ") for part in said.split(", ")):
        allowed = (_KINDS[kind.rstrip("?")], *([type(None)] if kind[-1] == "?" else []))
        for name in names.split():
            if name not in record:
                raise ConfigError(f"the record lacks {name!r}; it was not written by `sameseed {command}`")
            if not isinstance(record[name], allowed):
                raise ConfigError(
                    f"the record's {name!r} is {record[name]!r}; it was not written by `sameseed {command}`"
                )
    if record["schema"] not in FIELDS:
        raise ConfigError(f"the record has schema {record['schema']!r}, this version reads {BENCH_SCHEMA!r}")
