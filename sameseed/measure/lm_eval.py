"""sameseed as a model of lm-evaluation-harness: the harness's tasks run on the engine's own kernels and formats.

    from sameseed.measure.lm_eval import SameseedLM
    lm_eval.simple_evaluate(model=SameseedLM("embedded", format="w4a8"), tasks=["arc_easy"])

or the harness's own command, with this model registered:

    python -m sameseed.measure.lm_eval run --model sameseed --model_args pretrained=embedded --tasks arc_easy
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence as Seq
from typing import Any

import torch

from sameseed.engine.llm import LLM
from sameseed.errors import ConfigError, RequestError
from sameseed.measure.quality.perplexity import log_likelihoods
from sameseed.measure.quality.tasks import answer
from sameseed.request import SamplingParams

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    raise ConfigError(f"this needs lm-evaluation-harness ({error}): pip install '.[eval]'") from None

MAX_TOKENS = 256
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")  # named as in SamplingParams
IGNORED = {"do_sample", "until", "max_gen_toks", "max_new_tokens", "max_tokens", "max_length", "skip_special_tokens"}


@register_model("sameseed")
class SameseedLM(TemplateLM):
    """The harness's model interface over sameseed.

    `pretrained`: a loaded LLM, or a model name; then `settings` are keyword arguments of LLM. `batch_size` and
    `max_batch_size` come from the harness and are ignored: batching is continuous. `report(done, total)` counts
    answers. `num_cut`: prompts that were longer than the context and were cut at their beginning.
    """

    def __init__(
        self,
        pretrained: str | LLM = "embedded",
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        report: Callable[[int, int], None] = lambda done, total: None,
        **settings: Any,
    ) -> None:
        super().__init__()
        # The harness passes a GPU as the device when the user chose none.
        self._device = device if device and (torch.cuda.is_available() or not device.startswith("cuda")) else "cpu"
        self.llm = LLM(pretrained, device=self._device, **settings) if isinstance(pretrained, str) else pretrained
        self.name = pretrained if isinstance(pretrained, str) else "sameseed"
        self.report = report
        self.num_cut = 0

    @property
    def tokenizer_name(self) -> str:
        """Name under which the harness caches the chat template."""
        return self.name.replace("/", "__")

    @property
    def eot_token_id(self) -> int:
        return self.llm.engine.runner.model.config.eos_token_ids[0]

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without context: BOS, or the first EOS token of a model without BOS."""
        bos = self.llm.engine.runner.model.config.bos_token_id
        return self.eot_token_id if bos is None else bos

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        return self.llm.tokenizer.encode(string, add_special_tokens is not False)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The conversation as text, rendered with the model's chat template."""
        return self.llm.tokenizer.render_chat(chat_history, add_generation_prompt)

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """As the harness cuts them, but a last token that spans both belongs to the continuation."""
        before, after = super()._encode_pair(context, continuation)
        whole = [] if after or not continuation else self.tok_encode(context + continuation)
        return (whole[:-1], whole[-1:]) if whole else (before, after)

    def _loglikelihood_tokens(self, requests: list[Any], **kwargs: Any) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation given its context, and whether greedy decoding would generate it."""
        pairs = [(before or [self.prefix_token_id], after) for _, before, after in requests]
        longest = self.llm.engine.max_model_len + 1
        self.num_cut += sum(len(before) + len(after) > longest for before, after in pairs)
        # An empty continuation has probability 1 (log-likelihood 0) and always agrees with greedy decoding.
        scores = iter(log_likelihoods(self.llm.engine, [pair for pair in pairs if pair[1]], self.report))
        found = [next(scores) if after else (0.0, True) for _, after in pairs]
        return self._kept("loglikelihood", [texts for texts, _, _ in requests], found)

    def loglikelihood_rolling(self, requests: Iterable[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of each whole text after the BOS token, in windows as long as the model's context."""
        requests, pairs, counts = list(requests), list[tuple[list[int], list[int]]](), []
        for request in requests:
            tokens, length = self.tok_encode(request.args[0], False), self.llm.engine.max_model_len
            windows = list(get_rolling_token_windows(tokens, self.prefix_token_id, length, 1))
            pairs += map(make_disjoint_window, windows)
            counts.append(len(windows))
        scores = iter(log_likelihoods(self.llm.engine, pairs))
        found = [sum(next(scores)[0] for _ in range(count)) for count in counts]
        return self._kept("loglikelihood_rolling", [r.args for r in requests], found)

    def generate_until(self, requests: Iterable[Any], disable_tqdm: bool = False) -> list[str]:
        """The text generated after each context, up to a stop string (which is not included)."""
        requests = list(requests)
        params = [_params(r.args[1]) for r in requests]
        prompts = [self._prompt(r.args[0], p.max_tokens) for r, p in zip(requests, params, strict=True)]
        found = answer(self.llm, prompts, params, self.report)
        return self._kept("generate_until", [r.args for r in requests], found)

    def _prompt(self, context: str, max_tokens: int) -> list[int]:
        """The context's tokens; if they leave too little room for the answer, only the last ones.

        At most half of the model's context is reserved for the answer.
        """
        tokens = self.llm.tokenizer.encode(context) if context else [self.prefix_token_id]
        longest = self.llm.engine.max_model_len
        room = max(1, longest - min(max_tokens, longest // 2))
        self.num_cut += len(tokens) > room
        return tokens[-room:]

    def _kept(self, kind: str, arguments: Seq[Any], found: list[Any]) -> list[Any]:
        """Add the results to the harness's cache, and return them."""
        for each, result in zip(arguments, found, strict=True):
            self.cache_hook.add_partial(kind, each, result)
        return found


def _params(given: Mapping[str, Any]) -> SamplingParams:
    """SamplingParams from the harness's generation arguments. Raises RequestError for an unsupported argument."""
    until = given.get("until") or ()
    stop = (until,) if isinstance(until, str) else tuple(s for s in until if s)
    length = next((given[k] for k in ("max_gen_toks", "max_new_tokens", "max_tokens") if given.get(k)), MAX_TOKENS)
    for name in given:
        if name not in SAMPLING and name not in IGNORED:
            raise RequestError(f"generation argument {name!r} has no meaning here; leave it out of --gen_kwargs")
    chosen: dict[str, Any] = {k: given[k] for k in SAMPLING if given.get(k) is not None}
    if given.get("do_sample") is False:
        chosen["temperature"] = 0.0
    return SamplingParams(max_tokens=int(length), stop=stop, **({"seed": 0} | chosen))


def main() -> int:
    """The harness's own command, with this model registered."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
    return 0


if __name__ == "__main__":
    sys.exit(main())
