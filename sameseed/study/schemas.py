"""Schemas: what the records of each measuring command hold."""

from __future__ import annotations

from collections.abc import Mapping

from sameseed.errors import ConfigError

BENCH_SCHEMA = "sameseed.bench/1"
PROFILE_SCHEMA = "sameseed.profile/1"
EVAL_SCHEMA = "sameseed.eval/1"
CERTIFICATE_SCHEMA = "sameseed.certificate/1"
LOAD_SCHEMA = "sameseed.load/1"
TUNE_SCHEMA = "sameseed.tune/1"
SERVER_SCHEMA = "sameseed.server/1"
PEER_SCHEMA = "sameseed.peer/1"

Fields = dict[str, tuple[type, ...]]
_ORIGIN: Fields = {"schema": (str,), "commit": (str,), "machine": (dict,)}
_MEASURED: Fields = {**_ORIGIN, "time": (str,), "config": (dict,)}
_RUN: Fields = {**_MEASURED, "run": (str,)}  # what one command measured has one `run`

BENCH: Fields = {
    **_RUN,
    "repetitions": (list,),
    "tokens_per_s": (float,),
    "latency_s": (dict,),
    "ttft_s": (dict,),
    "time_per_output_token_s": (dict,),
    "acceptance_rate": (float, type(None)),
    "mean_acceptance_length": (float, type(None)),
    "rollbacks": (int,),
    "accepted_per_pos": (list,),
    "speedup": (float,),
    "equals_plain": (bool,),
    "time_split": (dict,),
    "overhead_ms_per_round": (float,),
}
PROFILE: Fields = {
    **_ORIGIN,
    "date": (str,),
    "threads": (int,),
    "backend": (str,),
    "limits": (dict,),
    "interleaved": (bool,),
    "interrupted": (bool,),
    "shape": (dict,),
    "stored": (list,),
    "costs": (list,),
    "prefill": (list,),
    "batch": (list,),
    "draft": (dict, type(None)),
}
EVAL: Fields = {
    **_RUN,
    "perplexity": (dict, type(None)),
    "tasks": (list,),
    "comparison": (dict, type(None)),
}
CERTIFICATE: Fields = {
    **_MEASURED,
    "effort": (float,),
    "verdict": (str,),
    "false_alarm": (float,),
    "seconds": (float,),
    "acceptance": (dict,),
    "checks": (list,),
    "left_out": (list,),
    "mutants": (dict, type(None)),
}
LOAD: Fields = {
    **_RUN,
    "repetitions": (list,),
    "output_tokens_per_s": (float,),
    "goodput_requests_per_s": (float,),
    "ttft_ms": (dict,),
    "tpot_ms": (dict,),
    "itl_chunk_ms": (dict,),
    "itl_token_ms": (dict, type(None)),
    "e2e_ms": (dict,),
    "acceptance": (dict, type(None)),
    "speedup": (float, type(None)),
    "same_texts": (list, type(None)),
    "errors": (dict,),
    "retries": (int,),
    "remarks": (list,),
}
TUNE: Fields = {
    **_MEASURED,
    "seconds": (float,),
    "best": (str,),
    "choice": (dict,),
    "baselines": (dict,),
    "errors": (dict,),
    "settings": (list,),
}
SERVER: Fields = {
    "schema": (str,),
    "commit": (str,),
    "time": (str,),
    "config": (dict,),
    "verdict": (str,),
    "ended": (str,),
    "died": (bool,),
    "seconds": (float,),
    "requests": (int,),
    "failures": (dict,),
    "promises": (list,),
    "not_asked": (list,),
    "texts": (list,),
}
PEER: Fields = {**_RUN, "engine": (str,), "rows": (list,), "missing": (dict,)}
FIELDS: dict[str, tuple[str, Fields]] = {  # the command that writes it, and what it holds
    BENCH_SCHEMA: ("bench", BENCH),
    PROFILE_SCHEMA: ("profile", PROFILE),
    EVAL_SCHEMA: ("eval", EVAL),
    CERTIFICATE_SCHEMA: ("verify-lossless", CERTIFICATE),
    LOAD_SCHEMA: ("bench serve", LOAD),
    TUNE_SCHEMA: ("tune --exhaustive", TUNE),
    SERVER_SCHEMA: ("verify-server", SERVER),
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
