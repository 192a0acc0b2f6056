"""Mutants of the shipped server code: mistakes in how it reads the fields of a request, and in how it answers."""

from proof.mutant import Mutant
from sameseed.server import frames, protocol, service
from sameseed.server.client import Stream
from sameseed.server.replies import CompletionReply, Reply, ReplyChoice
from sameseed.server.service import Service
from sameseed.server.text import TextCodec
from sameseed.server.worker import Worker

_TEMPERATURE = "1.0 if fields.temperature is None else fields.temperature"
_GIVEN = "given[name] = getattr(fields, name)"
_KEPT = "self.text.append(piece.text)"
_STOPPED = '"stop" if piece.completion.finish_reason == "stop" else "length"'


def _server(name, function, old, new):
    return Mutant(f"server: {name}", function, old, new, ("V1",))


def _sampling(name, old, new):
    return _server(name, service.sampling, old, new)


SERVER_MISTAKES = (
    _sampling("greedy unless a temperature is given", _TEMPERATURE, _TEMPERATURE.replace("1.0", "0.0")),
    _sampling("temperature 0 is none", _TEMPERATURE, "fields.temperature or 1.0"),
    _sampling("the first stop string alone", _GIVEN, f'{_GIVEN}[:1] if name == "stop" else getattr(fields, name)'),
    _sampling("each letter of a stop string", _GIVEN, f'{_GIVEN} if name != "stop" else tuple(fields.stop)'),
    _sampling("stop tokens are forgotten", '"stop_token_ids", ', ""),
    _sampling("banned tokens are forgotten", '"banned_token_ids", ', ""),
    _sampling("allowed tokens are forgotten", ', "allowed_token_ids"', ""),
    _sampling("end tokens always end", "bool(fields.ignore_eos) and not bound", "False"),
    _sampling("no least length", "min(fields.min_tokens or 0, max_tokens)", "0"),
    _sampling("a least length above the length", "min(fields.min_tokens or 0, max_tokens)", "fields.min_tokens or 0"),
    _sampling(
        "special tokens are spelt", "fields.skip_special_tokens is not False", "bool(fields.skip_special_tokens)"
    ),
    _sampling("a seed's sign is lost", "fields.seed % 2**63", "abs(fields.seed) % 2**63"),
    _sampling("seeds of 32 bits", "fields.seed % 2**63", "fields.seed % 2**32"),
    _sampling("seed 0 for all", "None if fields.seed is None or fields.seed == -1 else fields.seed % 2**63", "0"),
    _sampling("min-p is not read", '"min_p", ', ""),
    _sampling("top-k is not read", '"top_k", ', ""),
    _sampling("penalties are not read", "*penalties, ", ""),
    _sampling("n is not read", ', "n"):', ",):"),
    _sampling("a bias the other way", "int(key): value", "int(key): -value"),
    _sampling("more than the context holds", "min(wanted, room)", "wanted"),
    _sampling("a token beyond the vocabulary", "check(text.vocab_size,", "check(text.vocab_size + 1,"),
    _server("drafts are the operator's", service.speculation, "if asked is None:", "if True:"),
    _server("more draft tokens than asked for", service.speculation, "asked.num_draft_tokens)", "64)"),
    _server("a salt is not heeded", service.tenant, "salt is None", "True"),
    _server("the first tokens of a prompt that is cut", TextCodec._checked, "token_ids[-keep:]", "token_ids[:keep]"),
    _server("a prompt is not cut", protocol.Common.keep, "else self.truncate_prompt_tokens", "else None"),
    _sampling("16 tokens whatever is asked for", "max(1, fields.limit)", "16"),
    _server("no priority", Service._prepared, "fields.priority or 0", "0"),
    _server("prompts are not scored", Service._prepared, "fields.repeats and fields.top is not None", "False"),
    _server("requests without their settings", Worker._add, "names = (", "names = ()[:0] and ("),
    _server("tenants share an engine's rows", Worker._add, '"tenant", ', ""),
    _server("ends are told the other way", ReplyChoice.take, _STOPPED, _STOPPED.replace('"length"', '"stop"')),
    _server("pieces of a text are lost", ReplyChoice.take, _KEPT, "self.text[:] = [piece.text]"),
    _server(
        "log-probabilities are sent twice", CompletionReply._logprobs, "slice(choice.num_sent, None", "slice(0, None"
    ),
    _server("prompts count once more", Reply.usage, "self.num_prompt_tokens, self", "self.num_prompt_tokens + 1, self"),
    _server("the end of one is the end of all", Stream.push, "self.num_open -= 1", "self.num_open = 0"),
    _server("log-probabilities are rounded", frames._number, "max(value, LEAST_LOGPROB) if", "round(value, 3) if"),
)
