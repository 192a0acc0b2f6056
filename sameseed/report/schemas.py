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

Fields = dict[str, tuple[type, ...]]
_KINDS: Fields = {
    "text": (str,),
    "number": (float,),
    "count": (int,),
    "flag": (bool,),
    "object": (dict,),
    "list": (list,),
}


def _fields(said: str, base: Fields | None = None) -> Fields:
    """`base` plus the fields in `said`, "KIND: NAME NAME, KIND: NAME". "KIND?" also allows null."""
    found = dict(base or {})
    for part in said.split(","):
        kind, _, names = part.strip().partition(": ")
        found |= dict.fromkeys(names.split(), _KINDS[kind.rstrip("?")] + ((type(None),) if kind[-1] == "?" else ()))
    return found


_ORIGIN = _fields("text: schema commit, object: machine")
_MEASURED = _fields("text: time, object: config", _ORIGIN)
_RUN = _fields("text: run", _MEASURED)  # records of one command call share their `run`
BENCH = _fields(
    "list: repetitions, number: tokens_per_s, object: latency_s ttft_s time_per_output_token_s, number?: "
    "acceptance_rate mean_acceptance_length, count: rollbacks, list: accepted_per_pos, number: speedup, flag: "
    "equals_plain, object: time_split, number: overhead_ms_per_round",
    _RUN,
)
PROFILE = _fields(
    "text: date, count: threads, text: backend, object: limits, flag: interleaved interrupted, object: shape, list: "
    "stored costs prefill batch, object?: draft",
    _ORIGIN,
)
EVAL = _fields("object?: perplexity, list: tasks, object?: comparison", _RUN)
CERTIFICATE = _fields(
    "number: effort, text: verdict, number: false_alarm seconds, object: acceptance, list: checks left_out",
    _MEASURED,
)
LOAD = _fields(
    "list: repetitions, number: output_tokens_per_s goodput_requests_per_s, object: ttft_ms tpot_ms itl_chunk_ms, "
    "object?: itl_token_ms, object: e2e_ms, object?: acceptance, number?: speedup, list?: same_texts, object: errors, "
    "count: retries, list: remarks",
    _RUN,
)
TUNE = _fields("number: seconds, text: best, object: choice baselines errors, list: settings", _MEASURED)
PEER = _fields("text: engine, list: rows, object: missing", _RUN)
FIELDS: dict[str, tuple[str, Fields]] = {  # by schema: the command that writes the record, and the fields
    BENCH_SCHEMA: ("bench", BENCH),
    PROFILE_SCHEMA: ("profile", PROFILE),
    EVAL_SCHEMA: ("eval", EVAL),
    CERTIFICATE_SCHEMA: ("verify-lossless", CERTIFICATE),
    LOAD_SCHEMA: ("bench serve", LOAD),
    TUNE_SCHEMA: ("regret", TUNE),
    PEER_SCHEMA: ("study rivals", PEER),
}


def check(record: Mapping[str, object]) -> None:
    """Raise ConfigError naming the first field that is missing or of a wrong type."""
    schema = record.get("schema")
    command, fields = FIELDS.get(schema if isinstance(schema, str) else "", FIELDS[BENCH_SCHEMA])
    for name, kinds in fields.items():
        if name not in record:
            raise ConfigError(f"the record lacks {name!r}; it was not written by `sameseed {command}`")
        if not isinstance(record[name], kinds):
            raise ConfigError(f"the record's {name!r} is {record[name]!r}; it was not written by `sameseed {command}`")
    if record["schema"] not in FIELDS:
        raise ConfigError(f"the record has schema {record['schema']!r}, this version reads {BENCH_SCHEMA!r}")
