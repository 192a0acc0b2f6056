"""Checks that a body may be passed on to vLLM: text within limits, and no access to vLLM's internals or other hosts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sameseed.habits import REQUEST
from sameseed.server import limits
from sameseed.server.errors import ApiError, bad_request

# Fields that run a client's program, load a client's tensors, or reach vLLM's internals.
_ALIKE: tuple[str, ...] = ("prompt_embeds", "chat_template", "logits_processors", "use_beam_search")
_ALIKE += ("previous_response_id", "background")
REFUSED = {name: REQUEST[name].why for name in _ALIKE} | {
    "vllm_xargs": "vLLM's inner arguments are not for clients",
    "kv_transfer_params": "vLLM's inner arguments are not for clients",
    "ec_transfer_params": "vLLM's inner arguments are not for clients",
    "mm_processor_kwargs": "text only",
    "media_io_kwargs": "text only",
    "speculation": "vLLM drafts for all requests alike; leave 'speculation' out",
}
_WHOLE = ("prompt", "input", "tokens")  # the text itself: limited only by the body and the model's context
_LISTS = {"stop": limits.MAX_STOP, "logit_bias": limits.MAX_LOGIT_BIAS, "messages": limits.MAX_MESSAGES}
_LISTS |= {"chat_template_kwargs": limits.MAX_OPTIONS, "documents": limits.MAX_DOCUMENTS}
_LISTS |= {"tools": limits.MAX_TOOLS, "stop_token_ids": limits.MAX_STOP_TOKENS, "bad_words": limits.MAX_STOP_TOKENS}
_NUMBERS = {"n": limits.MAX_N, "best_of": limits.MAX_N, "top_logprobs": limits.MAX_TOP_LOGPROBS}
_NUMBERS |= {"logprobs": limits.MAX_TOP_LOGPROBS, "prompt_logprobs": limits.MAX_TOP_LOGPROBS}
_TEXTS = ("stop", "bad_words")
_PARTS = ("text", "thinking", "input_text", "output_text", "reasoning_text", "summary_text", "refusal")
_ITEMS: tuple[str, ...] = ("message", "reasoning", "function_call", "function_call_output")
_ITEMS += ("custom_tool_call", "custom_tool_call_output")
_TYPES = (*_PARTS, *_ITEMS, "function", "custom")  # the last two are types of a message's calls
_HOLDERS = ("content", "output", "summary")  # hold text, or a list of parts
_TOOLS = ("function", "custom", "namespace")  # types of tools that the client runs
# vLLM takes these keys for media even in a part whose type is text.
_MEDIA = {"image", "image_url", "image_pil", "image_embeds", "input_image", "prompt_embeds", "uuid"}
_MEDIA |= {"audio", "audio_url", "audio_embeds", "input_audio", "video", "video_url", "video_embeds"}
_MEDIA |= {"file", "file_url", "file_data", "file_id", "input_file"}


def check_greedy(body: Mapping[str, Any]) -> None:
    """Raise ApiError 400 for a sampled request: this vLLM would write a wrong text, for it and others in its batch."""
    if body.get("temperature") != 0:
        says = "vLLM samples wrongly with drafts on CPUs (vllm-project/vllm#55005): send temperature 0; or ask for a "
        raise bad_request(says + "server without a draft", param="temperature", code="unsupported_parameter")


def check(body: Mapping[str, Any]) -> None:
    """Raise ApiError 400 for a body that exceeds a limit, or asks for what no client may ask of vLLM."""
    for name, why in REFUSED.items():
        if body.get(name) not in (None, False, [], {}, ""):
            raise bad_request(f"{name!r} is not supported: {why}", param=name, code="unsupported_parameter")
    for name, most in _NUMBERS.items():
        value = body.get(name)  # a number in quotes is refused, though vLLM would take it
        if value is not None and not (isinstance(value, int | float) and (name == "n") <= value <= most):
            raise bad_request(f"{name} must lie in 0..{most}", param=name, code="invalid_value")
        if name == "n" and (isinstance(value, bool) or not isinstance(value, int | None)):
            raise bad_request("n must be a whole number", param=name, code="invalid_value")
    for name, value in body.items():
        most = _LISTS.get(name, limits.MAX_ALLOWED)
        if name not in _WHOLE and isinstance(value, list | dict) and len(value) > most:
            raise _bad(name, f"more than {most} entries")
    for name in _TEXTS:
        value = body.get(name)
        if any(isinstance(t, str) and len(t) > limits.MAX_STOP_LENGTH for t in _each(value)):
            raise _bad(name, f"more than {limits.MAX_STOP_LENGTH} characters in one")
    options = body.get("chat_template_kwargs") or {}
    if not isinstance(options, dict):
        raise _bad("chat_template_kwargs", "must be an object")
    for name, value in options.items():  # no template, and no lists or objects
        if name == "chat_template" or not isinstance(value, bool | int | str | None) or len(str(value)) > 64:
            raise _bad("chat_template_kwargs", f"{name[:64]!r} must be true, false, a number or a word")
    prompt = body.get("prompt")
    if num_prompts(prompt) > limits.MAX_PROMPTS:
        raise _bad("prompt", f"more than {limits.MAX_PROMPTS} prompts")
    if any(isinstance(p, dict) for p in _each(prompt)):
        raise _bad("prompt", "text or token ids only")
    for name in ("messages", "input"):
        _check_text(body.get(name), name)
    for tool in _each(body.get("tools")):
        if isinstance(tool, dict) and tool.get("type", "function") not in _TOOLS:
            raise _bad("tools", "only tools of type 'function', which the client runs")


def num_prompts(prompt: Any) -> int:
    """The number of prompts in a request's `prompt`."""
    several = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
    return len(prompt) if several else 1


def _check_text(messages: Any, name: str) -> None:
    """Raise ApiError 400 for anything but text: an image's URL would make vLLM connect to where a client chose."""
    left = [messages]
    while left:
        found = left.pop()
        if isinstance(found, dict | list):
            left.extend(found.values() if isinstance(found, dict) else found)
        if not isinstance(found, dict):
            continue
        kind = found.get("type")
        media = any(found[key] is not None for key in _MEDIA & found.keys())  # null in answers sent back
        if media or (kind is not None and kind not in _TYPES):
            raise _bad(name, "text only")
        for holder in _HOLDERS:
            held = found.get(holder)
            if isinstance(held, dict):
                raise _bad(name, f"{holder} must be text or a list of parts, text only")
            for part in held if isinstance(held, list) else ():
                if not isinstance(part, dict) or part.get("type") not in _PARTS:
                    raise _bad(name, "text only")


def _each(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _bad(name: str, what: str) -> ApiError:
    return bad_request(f"{name}: {what}", param=name, code="invalid_value")
