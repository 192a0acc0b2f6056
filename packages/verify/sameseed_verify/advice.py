"""What an operator can set, by server and promise: flags and fields from each server's documentation."""

from __future__ import annotations

GENERAL = {
    "load": "one request at a time keeps texts equal where nothing else does",
    "prefix": "requests with a cache of their own (cache_salt, or cache_prompt false) keep texts equal, at a price",
    "speculation": "leave speculation off where texts must not change, or set an exact rule of acceptance",
    "seeds": "send temperature 0 where texts must come again",
    "logprobs": "do not compute with these log-probabilities; they are not those of the text",
}
ENGINES: dict[str, dict[str, str]] = {
    "sameseed": {
        "speculation": "serve with --draft, so that there is something to switch",
        "broken": "this should not be: run `sameseed verify-lossless` with the same flags, and report what it finds",
    },
    "vllm": {
        "load": "VLLM_BATCH_INVARIANT=1 makes results independent of the batch, on the GPUs that it names",
        "ties": "VLLM_BATCH_INVARIANT=1 makes results independent of the batch, on the GPUs that it names",
        "prefix": "--enable-prompt-tokens-details tells of cache hits; --no-enable-prefix-caching switches them off",
        "speculation": "a request cannot switch it: compare with a server that has no --speculative-config (--again)",
    },
    "sglang": {
        "load": "--enable-deterministic-inference makes results independent of the batch",
        "ties": "--enable-deterministic-inference makes results independent of the batch",
        "seeds": "--enable-deterministic-inference makes seeded sampling repeatable",
        "prefix": "--enable-cache-report tells of cache hits; --disable-radix-cache switches them off",
        "speculation": "a request cannot switch it: compare with a server that has no draft (--again)",
    },
    "llama.cpp": {
        "load": "--parallel 1 takes one request after the other",
        "prefix": "--no-cache-prompt, or cache_prompt false in requests, computes every prompt anew",
        "speculation": "newer ones let no request switch it: compare with a server that has no draft (--again)",
    },
    "openvino": {
        "load": "--max_num_seqs 1 takes one request after the other",
        "prefix": "--enable_prefix_caching false computes every prompt anew",
    },
}
OWNERS = {"sameseed": "sameseed", "vllm": "vllm", "sglang": "sglang", "llamacpp": "llama.cpp", "ovms": "openvino"}


def engine_of(owner: object) -> str:
    """The server's name, from the `owned_by` field of its models; "" if unknown."""
    return OWNERS.get(str(owner).lower(), "")


def advice(engine: str, promise: str, broken: bool) -> str:
    """Advice for a promise that is broken or not shown; "" if there is none."""
    known = ENGINES.get(engine, {})
    if broken and "broken" in known:
        return known["broken"]
    return known.get(promise, "") or (GENERAL.get(promise, "") if broken else "")
