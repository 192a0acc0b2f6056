"""A model's weights and tokenizer, for the textbook decoder."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sameseed_verify import VerifyError
from sameseed_verify.prompts import Prompt
from sameseed_verify.reading import ServedText

if TYPE_CHECKING:
    from sameseed.models.decoder import Decoder
    from sameseed.tokenizer import Tokenizer

Read = tuple[tuple[int, ...], tuple[int, ...]]  # tokens of a prompt, and of the text generated after it
Verdict = tuple[int, bool, bool]  # a token; whether it is the textbook's choice; whether it is near the choice


@dataclass(frozen=True)
class Weights:
    """A model's weights and tokenizer. `share`: tolerated difference of logits, as a share of the largest logit."""

    model: Decoder
    tokenizer: Tokenizer
    kv_format: str
    share: float
    judged: dict[Read, list[Verdict]] = field(default_factory=dict)  # texts that were judged before

    def encode(self, prompt: Prompt, chat: bool) -> tuple[int, ...]:
        """The prompt's tokens, encoded as the server should encode them."""
        if chat and prompt.text is not None:
            return tuple(self.tokenizer.chat([{"role": "user", "content": prompt.text}]))
        if chat:
            return tuple(self.tokenizer.chat(list(prompt.messages)))
        return tuple(self.tokenizer.encode(prompt.said))

    def tokens(self, prompt: Prompt, chat: bool, answer: ServedText) -> Read | None:
        """Tokens of prompt and answer; None if the server gives no ids and the text does not determine them."""
        own = answer.prompt_token_ids or self.encode(prompt, chat)
        if answer.token_ids:
            return own, answer.token_ids
        if not answer.text:
            return None
        again = self.tokenizer.encode(answer.text, add_special_tokens=False)
        whole = self.tokenizer.decode(again) == answer.text and len(again) in (answer.num_tokens, answer.num_tokens - 1)
        return (own, tuple(again)) if whole else None


def load_weights(model: str, format: str, kv_format: str, share: float | None) -> Weights:
    """Load a model and its tokenizer. `share` None: the textbook's tolerance. Raises VerifyError."""
    try:
        from sameseed import ops
        from sameseed.errors import SameseedError
        from sameseed.laws import textbook
        from sameseed.models.loader import load_model, load_tokenizer, resolve_model, target_scheme
    except ModuleNotFoundError:
        raise VerifyError("--model reads weights with sameseed: pip install 'sameseed-verify[weights]'") from None
    kv = "bf16" if kv_format == "auto" else kv_format
    try:
        folder = resolve_model(model)
        llama = load_model(folder, ops.resolve("reference"), target_scheme(format, folder))
        tokenizer = load_tokenizer(folder)
    except SameseedError as error:
        raise VerifyError(str(error)) from None
    return Weights(llama, tokenizer, kv, textbook.tolerance(llama, kv) if share is None else share)
