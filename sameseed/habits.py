"""Names from vLLM, transformers and llama.cpp: the name here, or why there is none (docs/guides/coming-from.md)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sameseed import fields, registry
from sameseed.errors import ConfigError, NoSuchNameError, RequestError, SameseedError


@dataclass(frozen=True)
class Word:
    """A name in another library. `here`: the name in sameseed. `values`: the other library's values, and ours.

    `same`: values that ask for what sameseed does anyway. `why`: what to do instead. An empty Word has no effect on
    texts: any value is dropped.
    """

    here: str = ""
    values: Mapping[str, str] = field(default_factory=dict)
    same: Collection[object] = ()
    why: str = ""


DTYPES = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32"}
_FORMAT = "format='auto' reads what the checkpoint stores; format='w4a8' or 'w8a8' rounds the weights while reading"
_ONE_DEVICE = "one engine runs on one device; for several GPUs: sameseed serve --engine vllm"
_TEMPLATE = "the model's own chat template is used; generate takes a text that is rendered already"
_BEAMS = "there is no beam search; n=... draws several texts"
_NO_DROPS = "weights and cache stay on the device; lower num_blocks, or take a format of fewer bits"
_ON_DEVICE = "device='cuda' or 'cpu' says where the whole model runs"

SETTINGS: Mapping[str, Word] = {
    **dict.fromkeys(("model_path", "pretrained_model_name_or_path", "repo_id"), Word("model")),
    **dict.fromkeys(("dtype", "torch_dtype"), Word("format", DTYPES)),
    **dict.fromkeys(("speculative_model", "assistant_model", "draft_model"), Word("draft")),
    **dict.fromkeys(("max_num_batched_tokens", "n_batch"), Word("max_num_rows")),
    "num_speculative_tokens": Word("num_draft_tokens"),
    "kv_cache_dtype": Word("kv_format", {**DTYPES, "fp8": "fp8_e4m3"}),
    "enable_prefix_caching": Word("prefix_cache"),
    "num_gpu_blocks_override": Word("num_blocks"),
    "n_ctx": Word("max_model_len", same=(0,)),
    "n_threads": Word("threads"),
    **dict.fromkeys(("quantization", "quantization_config"), Word(why=_FORMAT)),
    **dict.fromkeys(("load_in_4bit", "load_in_8bit"), Word(same=(False,), why=_FORMAT)),
    **dict.fromkeys(("type_k", "type_v"), Word(why="kv_format='int8' says it for both, 'int8/bf16' for each")),
    **dict.fromkeys(
        ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"), Word(same=(1,), why=_ONE_DEVICE)
    ),
    "device_map": Word(same=("cpu",), why=_ON_DEVICE),
    "filename": Word(why="give the path of the .gguf file, or the folder, as the model"),
    "n_gpu_layers": Word(same=(0,), why=_ON_DEVICE),
    **dict.fromkeys(("swap_space", "cpu_offload_gb"), Word(same=(0,), why=_NO_DROPS)),
    "enable_chunked_prefill": Word(same=(True,), why="prompts always run in chunks of max_num_rows"),
    "attn_implementation": Word(why="backend=... chooses who computes"),
    **dict.fromkeys(("tokenizer", "tokenizer_mode"), Word(same=("auto",), why="it is read from the model's folder")),
    "revision": Word(why="download that revision, and give its folder as the model"),
    **dict.fromkeys(("download_dir", "cache_dir"), Word(why="the variable HF_HOME says it")),
    **dict.fromkeys(("token", "hf_token"), Word(why="the variable HF_TOKEN says it")),
    "enable_lora": Word(same=(False,), why="merge the adapter into the weights first"),
    **dict.fromkeys(("task", "runner"), Word(same=("generate", "auto"), why="the engine generates text only")),
    **dict.fromkeys(("chat_template", "chat_format"), Word(why=_TEMPLATE)),
    **dict.fromkeys(
        (
            *("trust_remote_code", "enforce_eager", "disable_log_stats", "disable_log_requests", "verbose"),
            *("use_mmap", "use_cache", "use_safetensors", "low_cpu_mem_usage", "max_logprobs"),
            "logits_all",
        ),
        Word(),
    ),
}
SPECULATIVE: Mapping[str, Word] = {
    "num_speculative_tokens": Word("num_draft_tokens"),
    "draft_tensor_parallel_size": Word(same=(1,), why=_ONE_DEVICE),
}
OPTIONS: Mapping[str, Mapping[str, str]] = {  # by drafter: vLLM's option name, ours
    "ngram": {"prompt_lookup_min": "min_ngram", "prompt_lookup_max": "max_ngram"},
    "suffix": {
        "suffix_decoding_max_tree_depth": "max_match",
        "suffix_decoding_max_spec_factor": "length_factor",
        "suffix_decoding_min_token_prob": "min_probability",
    },
}
SAMPLING: Mapping[str, Word] = {
    **dict.fromkeys(("max_new_tokens", "max_completion_tokens", "n_predict"), Word("max_tokens")),
    "min_new_tokens": Word("min_tokens"),
    "num_return_sequences": Word("n"),
    "repeat_penalty": Word("repetition_penalty"),
    **dict.fromkeys(("stop_strings", "stop_sequences"), Word("stop")),
    "max_length": Word(why="max_tokens=... counts the new tokens alone"),
    "eos_token_id": Word(why="stop_token_ids=... adds to the model's own, ignore_eos=True leaves those out"),
    "bad_words": Word(same=([],), why="banned_token_ids=... takes single tokens"),
    "logits_processors": Word(why="logit_bias=... or allowed_token_ids=... may do"),
    **dict.fromkeys(("num_beams", "best_of"), Word(same=(1,), why=_BEAMS)),
    **dict.fromkeys(("use_beam_search", "early_stopping"), Word(same=(False,), why=_BEAMS)),
    "length_penalty": Word(same=(1,), why=_BEAMS),
    "typical_p": Word(same=(1,), why="top_p=... or min_p=... does alike"),
    "no_repeat_ngram_size": Word(same=(0,), why="frequency_penalty=... does alike"),
    "include_stop_str_in_output": Word(same=(False,), why="the text ends before the stop string"),
    "detokenize": Word(same=(True,), why="token_ids stand beside the text"),
    "prompt_logprobs": Word(why="a Request with score_prompt=True has them (llm.engine.add)"),
    **dict.fromkeys(
        ("guided_decoding", "structured_outputs", "grammar"), Word(why="the server's response_format takes schemas")
    ),
    "output_kind": Word(why="each delta has the new text as .text, and all so far as .outputs[0].text"),
    "pad_token_id": Word(),
}
GENERATE: Mapping[str, Word] = {
    "sampling_params": Word("params"),
    "generation_config": Word(why="give SamplingParams(...)"),
    **dict.fromkeys(("use_tqdm", "attention_mask"), Word()),
    "stream": Word(same=(False,), why="llm.stream(prompt, params) gives piece after piece"),
    **dict.fromkeys(("echo", "return_full_text"), Word(same=(False,), why="completion.prompt + completion.text")),
    "prompt_token_ids": Word(why="give the ids as the prompt"),
    "lora_request": Word(why="merge the adapter into the weights first"),
    "add_generation_prompt": Word(same=(True,), why=_TEMPLATE),
    "continue_final_message": Word(same=(False,), why=_TEMPLATE),
    **dict.fromkeys(("chat_template", "chat_template_kwargs", "tools"), Word(why=_TEMPLATE)),
}
_FRONT = {
    "__call__": "generate(prompt, params)",
    "get_metrics": "generate(prompt)[0].metrics, for each completion",
    "get_default_sampling_params": "generate(prompt, SamplingParams(...)): generation_config.json sets none",
    "sleep": "close()",
    "create_completion": "generate(prompt)",
    "create_chat_completion": "chat(messages)",
    "create_chat_completion_openai_v1": "chat(messages)",
    "beam_search": f"generate(prompt, n=...): {_BEAMS}",
    "llm_engine": "engine",
    "shutdown": "close()",
    "tokenize": "tokenizer.encode(text)",
    "encode": "tokenizer.encode(text)",
    "embed": f"nothing: {SETTINGS['task'].why}",
}
ATTRIBUTES: Mapping[str, Mapping[str, str]] = {  # by class: the other library's attribute, what to write
    "LLM": _FRONT,
    "AsyncLLM": _FRONT,
    "Tokenizer": {
        "__call__": "encode(text)",
        "apply_chat_template": "chat(messages) for token ids, render_chat(messages) for text",
        "batch_decode": "decode(token_ids) for each",
        "get_vocab": "vocabulary()",
    },
    "Completion": {
        "generated_text": "text",
        "choices": "text",
        "usage": "metrics",
        "stop_reason": "finish_reason",
        "cumulative_logprob": "logprobs",
    },
    "TokenLogprob": {
        "items": "token_id, .logprob, .top",
        "values": "logprob",
        "decoded_token": "token_id, for tokenizer.decode",
    },
}


def translate(
    given: Mapping[str, Any], words: Mapping[str, Word], error: type[SameseedError] = ConfigError
) -> dict[str, Any]:
    """The keywords with sameseed's names. Names that are not in `words` stay unchanged, for the receiver to check.

    A value of None is ignored. Raises `error`, which says what to do instead, for what sameseed does not have.
    """
    made = {name: value for name, value in given.items() if name not in words}
    for name in given.keys() & words.keys():
        word, value = words[name], given[name]
        if value is None or value in word.same or word == Word():
            continue
        if not word.here:
            raise error(f"{name}={value!r}: {word.why}")
        if made.get(word.here) is not None:
            raise error(f"{name} is called {word.here} here, and both are given; leave {name} out")
        made[word.here] = word.values.get(str(value).removeprefix("torch."), value)
    return made


def sampling(given: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords of SamplingParams from those of other libraries. Raises RequestError."""
    made = translate({k: v for k, v in given.items() if k != "do_sample"}, SAMPLING, RequestError)
    asked = given.get("do_sample")
    if asked is not None and bool(asked) != (made.get("temperature") not in (None, 0)):
        raise RequestError(f"do_sample={asked!r}: temperature=0 is greedy, above 0 it samples")
    return made


def settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of LLM (including `model` and `draft`) from those of other libraries. Raises ConfigError."""
    made = translate({k: v for k, v in given.items() if k != "speculative_config"}, SETTINGS)
    config = given.get("speculative_config")
    for name, value in ({} if config is None else _speculation(config)).items():
        if made.get(name) is not None:
            raise ConfigError(f"speculative_config says {name} too; give one of them")
        made[name] = value
    return made


def _speculation(config: Any) -> dict[str, Any]:
    """vLLM's speculative_config as settings."""
    if not isinstance(config, Mapping):
        raise ConfigError(f"speculative_config is a dict with 'method', 'model', ..., got {config!r}")
    method, model = config.get("method"), config.get("model")
    options = OPTIONS.get(str(method), {})
    fields.check_keys(config, ("method", "model", *options, *SPECULATIVE), "speculative_config")
    if method in (None, "draft_model", "eagle", "eagle3"):
        if not model:
            raise ConfigError("speculative_config names no 'model'; give one, or a 'method' like 'ngram'")
        made = {"draft": model}
    else:
        registry.load("drafters", method)
        made = {"draft": f"{method}:{model}" if model else method}
    if chosen := {ours: config[theirs] for theirs, ours in options.items() if config.get(theirs) is not None}:
        made["draft_options"] = chosen
    return made | translate({k: v for k, v in config.items() if k in SPECULATIVE}, SPECULATIVE)


class Hinted:
    """Base of classes whose error for another library's attribute names the attribute to use here."""

    if not TYPE_CHECKING:  # else type checkers would accept any attribute

        def __getattr__(self, name: str) -> object:
            kind = type(self).__name__
            word = ATTRIBUTES.get(kind, {}).get(name)
            hint = "" if word is None else f"; here it is .{word}"
            raise NoSuchNameError(f"{kind!r} object has no attribute {name!r}{hint}")

        def __call__(self, *given: object, **more: object) -> object:
            kind = type(self).__name__
            word = ATTRIBUTES.get(kind, {}).get("__call__")
            hint = "" if word is None else f"; here it is .{word}"
            raise NoSuchNameError(f"{kind!r} object is not callable{hint}")
