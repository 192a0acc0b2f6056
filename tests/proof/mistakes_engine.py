"""Mistakes of processors, grammars, positions, prefixes, the scheduler's ends, scores, drafts' state and ops."""

from proof.mutant import REFERENCE, Mutant
from sameseed import batch
from sameseed.drafters._followers import Followers
from sameseed.drafters.parallel import ParallelDrafter
from sameseed.engine.engine import Engine
from sameseed.engine.running import OutputText, Running
from sameseed.grammar import Choice
from sameseed.kvcache.blocks import BlockManager
from sameseed.kvcache.prefix import Prefixes
from sameseed.ops import reference
from sameseed.spec import sampling, verify

_COUNT = vars(sampling.SamplingState)["of"].__func__  # the function behind the class method
_EACH = "np.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)"
_GRAMMAR = "seq.grammar.allowed(seq.output_token_ids, _written(seq, path))"


def _text(name, function, old, new, *checks):
    """One that texts show, plain ones too: the textbook must tell."""
    return Mutant(name, function, old, new, checks or ("T1",))


def _native(name, old, new):
    return Mutant(f"native sampler: {name}", sampling.draw_of, old, new, ("T1",), native=True)


def _op(name, function, old, new, *checks, **settings):
    return Mutant(name, function, old, new, checks or ("B1",), REFERENCE | settings)


_PROCESSORS = (
    _text("allowed tokens are not heeded", sampling.adjust, "row[:] = -np.inf", "pass"),
    _text("every other banned token is forgotten", sampling.adjust, "for t in banned if", "for t in banned[::2] if"),
    _text("the least length counts the prompt", sampling.adjust, "0 <= num_written", "0 <= len(seq)"),
    _text("the least length forgets the draft", sampling.adjust, "num_written <", "seq.num_output <"),
    _text(
        "prompts that are scored count as written", sampling._written, "path[max(0, -seq.num_output) :]", "path", "P2"
    ),
    _text("what was scored counts as written", _COUNT, "max(state.num_seen, seq.num_prompt)", "state.num_seen", "P2"),
    _text("a bias counts twice", sampling.adjust, "row[token] += bias", "row[token] += 2 * bias"),
    _text("repetition raises high logits", sampling._penalize, _EACH, _EACH.replace("/", "*")),
    _text("repetition forgets the prompt", sampling._penalize, "flatnonzero(seen | in_prompt)", "flatnonzero(seen)"),
    _text("no penalty of presence", sampling._penalize, " + params.presence_penalty", ""),
    _text(
        "frequency is presence",
        sampling._penalize,
        "params.frequency_penalty * counts[index]",
        "params.frequency_penalty",
    ),
    _text("a token counts once however often", _COUNT, "state.counts[token] += 1", "state.counts[token] = 1"),
    _text("min-p is its root", sampling._floor, "np.log(params.min_p)", "np.log(params.min_p) / 2"),
    _text("no temperature below 0.3", sampling._divisor, "params.temperature, _COLDEST", "params.temperature, 0.3"),
    _text("greedy texts heed grammars alone", sampling.plain_greedy, "shaped_by_model(seq)", "seq.grammar is None"),
    _native("noise of the next position", "noise_key(seed, position)", "noise_key(seed, position + 1)"),
    _native("one token too many of top-k", "params.top_k,", "params.top_k + (params.top_k > 0),"),
    _native("no temperature", "_divisor(params),", "1.0,"),
    _native("no top-p", "params.top_p)", "1.0)"),
    _native("no min-p", "_floor(params),", "-np.inf,"),
)
_GRAMMARS = (
    _text("a grammar rules nothing out", sampling._allow, "row.fill(-np.inf)", "pass"),
    _text("a grammar forgets the draft", sampling.adjusted, _GRAMMAR, "seq.grammar.allowed(seq.output_token_ids, [])"),
    _text("a grammar forgets the first token", Choice.allowed, "[*output, *path]", "[*output, *path][1:]"),
    _text("a text may end before its grammar", Choice._tokens, "if len(self._choices[begin]) == size", "if True"),
    _text("a grammar mixes its places up", Choice.allowed, "(begin, len(written))", "(begin, 0)"),
)
_PLACES = (
    _op(
        "a node's position is one too high",
        batch.build_batch,
        "[kv_len + d for d in depths]",
        "[kv_len + d + 1 for d in depths]",
        "L2",
    ),
    _op(
        "first nodes see those before them",
        batch.ancestor_masks,
        "1 << i if parent < 0",
        "(2 << i) - 1 if parent < 0",
        "L2",
    ),
    _text(
        "rows of the second block lie in the first",
        batch.slots_of,
        "blocks[i // block_size]",
        "blocks[i // block_size * (i >= 2 * block_size)]",
        "T1",
        "L2",
    ),
)
_PREFIXES = (
    _text(
        "a block is known without what comes before it",
        Prefixes._digests,
        "hashlib.sha256(parent + self._pack(seq.token_ids, i))",
        "hashlib.sha256(self._pack(seq.token_ids, i))",
        "P1",
    ),
    _text("tenants share beginnings", Prefixes._digests, 'seq.tenant.encode("utf-8", "surrogatepass")', 'b""', "P1"),
    _text(
        "one row more than was found",
        BlockManager.adopt,
        "seq.num_cached = len(seq.blocks) * self.block_size",
        "seq.num_cached = len(seq.blocks) * self.block_size + 1",
        "L2",
        "P1",
    ),
    _text("who shares a block does not count", BlockManager.adopt, "self._num_users[block] += 1", "pass", "C2", "P1"),
    _text(
        "a block given out anew is found as the old one",
        BlockManager.reserve,
        "self.prefixes.drop(block)",
        "pass",
        "P1",
    ),
)
_ENDS = (
    _text("tokens beyond the end stay", Running.take, "del self.seq.token_ids[base + taken :]", "pass", "S1"),
    _text(
        "a stop string ends a text that is too short",
        Running._end,
        "may_stop=num_output >= params.min_tokens",
        "may_stop=True",
    ),
    _text(
        "a stop string across tokens is missed", OutputText.push, "max(0, known - len(s) + 1 - begin)", "known - begin"
    ),
    _text("a character of the stop string stays", OutputText.push, "latest[: min(found)]", "latest[: min(found) + 1]"),
    _text("an end token ends nothing", Running._end, "params.ending(self.eos)", "params.stop_token_ids"),
    _text(
        "a token less than asked for",
        Running._end,
        "num_output = length - self.seq.num_prompt",
        "num_output = length - self.seq.num_prompt + 1",
    ),
    _text("an aborted request goes on", Engine.abort, "for r in live]", "for r in live[:0]]", "W1"),
)
_SCORES = (
    _text(
        "scores of the last chunk alone",
        Engine._take,
        "seq.prompt_logprobs += result.logprobs[b]",
        "seq.prompt_logprobs = result.logprobs[b]",
        "P2",
    ),
    _text(
        "a prompt's last token is chosen anew",
        verify._walk,
        "position < len(seq.script)",
        "position + 1 < len(seq.script)",
        "P2",
    ),
    _text("probabilities do not add up to one", sampling.token_logprob, "np.exp(row).sum()", "np.exp(row).max()", "P2"),
)
_DRAFTS = (
    _text("a draft's blocks stay taken", Followers.release, "self.runner.blocks.release(shadow.seq)", "pass", "C2"),
    _text(
        "a draft never forgets a request",
        Followers.release,
        "self._shadows.pop(seq.seq_id, None)",
        "self._shadows.get(seq.seq_id)",
        "C2",
    ),
    Mutant(
        "a parallel draft keeps the rows of its masks",
        ParallelDrafter._draft,
        "[[] for _ in shadows], out)",
        "[list(range(n - 1)) for n in counts], out)\n"
        "    guesses = iter(out.logits.argmax(-1).tolist())\n"
        "    for shadow, n in zip(shadows, counts):\n"
        "        shadow.token_ids += [next(guesses) for _ in range(n)]",
        ("C1",),
        {"draft": "parallel"},
    ),
)
_OPS = (
    _op(
        "cached rows have one scale for all",
        reference.store_kv,
        "[index] = new_scales",
        "[index] = new_scales.mean()",
        "C1",
        "L2",
        "B1",
        kv="int8",
    ),
    _op(
        "a row does not see itself",
        reference.attention,
        "torch.arange(positions[t] + 1,",
        "torch.arange(max(1, positions[t]),",
        "B1",
    ),
    _op(
        "heads read the wrong keys",
        reference.attention,
        ".view(k.shape[1], -1, q.shape[2])",
        ".view(-1, k.shape[1], q.shape[2]).transpose(0, 1)",
    ),
    _op("rotation turns one half the other way", reference.rope, "x2 * cos + x1 * sin", "x2 * cos - x1 * sin"),
    _op("a gate is a sigmoid alone", reference.silu_mul, "torch.nn.functional.silu(", "torch.sigmoid("),
    _op("a norm's epsilon is too large", reference.rms_norm, "+ eps", "+ 1e-2"),
    _op("the stream of a layer is not carried on", reference.product, "residual + out", "out", "T1"),
    _op("tokens of a pass change places", reference.embedding, "(w, token_ids)", "(w, token_ids.flip(0))", "L2", "T1"),
    _op(
        "integer rows take the first row's scale",
        reference._integer_product,
        "row_scales[t, g]",
        "row_scales[0, g]",
        "L1",
        format="w8a8",
    ),
)
ENGINE_MISTAKES = (*(_PROCESSORS + _GRAMMARS + _PLACES), *(_PREFIXES + _ENDS + _SCORES + _DRAFTS + _OPS))
