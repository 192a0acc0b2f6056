"""Known mistakes of every part that texts pass through, as mutants of the source."""

from proof.mutant import REFERENCE, Mutant
from sameseed import batch, scheme
from sameseed.drafters._followers import Followers
from sameseed.drafters.parallel import ParallelDrafter
from sameseed.engine.engine import Engine
from sameseed.engine.running import OutputText, Running
from sameseed.engine.scheduler import Scheduler
from sameseed.grammar import Choice
from sameseed.kvcache.blocks import BlockManager
from sameseed.kvcache.prefix import Prefixes
from sameseed.models.runner import ModelRunner
from sameseed.ops import reference
from sameseed.spec import sampling, verify

_WALK = "_walk(path, table[row:end], seq, draft_tokens, parents, made, eos_token_ids)"
_CHOOSE = "token = choose(table[at], seq, path.tokens, eos_token_ids)"
_CHILD = "child = children.get((node, token))"
_AT = "at, position = 1 + node,"
_GUESS = """from sameseed.spec.sampling import probability
            sampled = () if seq.params.greedy else [t for p, t in children if p == node]
            good = [t for t in sampled if probability(table[at], seq, t) > {limit}]
            token = good[0] if good else choose(table[at], seq, path.tokens, eos_token_ids)"""
_UNIFORM = "__import__('random').Random(seq.seed * 7919 + position).random()"
_PRODUCT = "out = _by_row(lambda row: torch.mv(weight, row), x, w.shape[0])"
_SUM = "out = sum(_by_row(lambda x, w=p: torch.mv(w.contiguous(), x), r.contiguous(), w.shape[0]) for p, r in parts)"
_PARTS = "parts = list(zip(weight.split(width, 1), x.split(width, 1)))\n        " + _SUM
_COUNT = vars(sampling.SamplingState)["of"].__func__  # the function behind the class method
_EACH = "np.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)"
_GRAMMAR = "seq.grammar.allowed(seq.output_token_ids, _written(seq, path))"
_SHARED = "x.abs().amax(-1, keepdim=True)", "x.abs().amax().expand(*x.shape[:-1], 1)"


def _text(name, function, old, new, *checks, **settings):
    """One that texts show, plain ones too, unless checks are named: the textbook must tell."""
    return Mutant(name, function, old, new, checks or ("T1",), settings)


def _walk(name, old, new, *checks):
    return _text(name, verify._walk, old, new, *(checks or ("L3",)))


def _commit(name, old, new):
    return _text(f"commit {name}", ModelRunner.commit, old, new, "C1", "L3", "L6")


def _op(name, function, old, new, *checks, **settings):
    return _text(name, function, old, new, *(checks or ("B1",)), **REFERENCE, **settings)


def _mask(name, old, new):
    return _op(name, batch.ancestor_masks, old, new, "L2", "L3")


def _product(name, new, check="L1"):
    return _op(name, reference.product, _PRODUCT, new, check)


def _native(name, old, new):
    return Mutant(f"native sampler: {name}", sampling.draw_of, old, new, ("T1",), native=True)


# fmt: off
MISTAKES = (
    _walk("accepts one token too many", f"path.tokens.append(token)\n        {_CHILD}",
        f"{_CHILD}\n        if child is None and node < 0 and draft_tokens:\n"
        "            child, token = 0, draft_tokens[0]\n        path.tokens.append(token)"),
    _walk("accepts any guess", _CHILD, "child = next((c for (p, _), c in children.items() if p == node), None)"),
    _walk("accepts by a threshold instead of the rule", _CHOOSE, _GUESS.format(limit="0.25"), "L6", "L5"),
    # min(1, p / q) with q = 1, then a draw from all of p
    _walk("rejects by probability and forgets the residual", _CHOOSE, _GUESS.format(limit=_UNIFORM), "L6", "L5"),
    _walk("takes the bonus token from the row before", _AT, "at, position = max(node, 0),"),
    _walk("takes a node's row by its depth in the tree", _AT, "at, position = len(path.nodes),"),
    _text("loses count of the rows of a batch", verify.verify, "row = end", "row += 1 + len(path.nodes)", "L3"),
    _walk("forgets the drafted path: noise and penalties are used twice", _CHOOSE,
        _CHOOSE.replace("path.tokens", "[]"), "L6"),
    _text("mixes the place in the batch into the seed", verify.verify, _WALK,
        f"seq.seed += b\n                {_WALK}\n                seq.seed -= b", "L6"),
    _walk("log-probabilities forget the drafted path", "token_logprob(table[at], seq, path.tokens,",
        "token_logprob(table[at], seq, [],", "L9"),
    _walk("rejects every guess", _CHILD, "child = None", "A1"),
    _commit("keeps a rejected row", "seq.num_cached = known + len(nodes[b])",
        "seq.num_cached = known + len(nodes[b])\n        last = nodes[b][-1] + 1 if nodes[b] else 0\n"
        "        if 0 < last < output.row_offsets[b + 1] - output.row_offsets[b] - num_pending[b]:\n"
        "            src.append(self._slot(seq, known + last))\n"
        "            dst.append(self._slot(seq, seq.num_cached - 1))"),
    _commit("moves nothing", "if src:", "if False:"),
    _commit("to the place after", "dst.append(self._slot(seq, known + place))",
        "dst.append(self._slot(seq, known + place + 1))"),
    _commit("from the place before", "src.append(self._slot(seq, known + node))",
        "src.append(self._slot(seq, known + node - 1))"),
    _mask("the tree mask is shifted by a bit", "return masks,",
        "return [m >> 1 | 1 << i for i, m in enumerate(masks)],"),
    _mask("a node sees its siblings", "masks[parent] | 1 << i", "masks[parent] | (2 << i) - 1"),
    _mask("a node does not see its grandparents", "masks[parent] | 1 << i", "1 << parent | 1 << i"),
    _mask("a node's position is its place, not its depth", "depths[parent] + 1", "i"),
    _op("moves keys and forgets values", reference.move_kv, "_flat(layer)", "_flat(layer)[::2]", "C1", "L3"),
    _text("noise ignores the position", sampling.noise_key, "position * ", "0 * "),
    _text("noise ignores the seed", sampling.noise_key, "seed & _MASK", "0"),
    _text("noise ignores the token", sampling.gumbel_noise, "z += _ONE", "z[:] = _ONE"),
    _text("noise is uniform, not Gumbel", sampling.gumbel_noise, "for _ in range(2):", "for _ in range(0):"),
    _text("top-k keeps one token too many", sampling.survivors, "-params.top_k)[-params.top_k]",
        "-params.top_k - 1)[-params.top_k - 1]"),
    _text("top-p stops too early", sampling.survivors, "weights, params.top_p", "weights, params.top_p * 0.9"),
    _text("the temperature is applied twice", sampling.survivors, "_scaled(row, params)",
        "_scaled(row, params) / _divisor(params)"),
    _text("penalties do not see the draft", sampling._penalize, "if written:", "if False:", "L9", "L6"),
    _text("penalties of a draft stay", sampling._penalize, "counts = counts.copy()", "pass", "L9", "L6"),
    _product("split-K: several rows add up in two halves",
        f"width = -(-weight.shape[1] // (1 + (len(x) > 1)))\n        {_PARTS}"),
    _product("rows at odd places add up backwards",
        "out = torch.stack([torch.mv(weight.flip(1), r.flip(0)) if t % 2 else torch.mv(weight, r.clone())"
        " for t, r in enumerate(x)])"),
    _product("chunks of K depend on the number of threads",
        f"width = -(-weight.shape[1] // torch.get_num_threads())\n        {_PARTS}"),
    _product("a product forgets the last column",
        "out = _by_row(lambda r: torch.mv(weight[:, :-1], r[:-1]), x, w.shape[0])", "B1"),
    _op("a norm reads another row", reference.rms_norm, "row.square().mean()",
        "(row + 1e-3 * x[-1]).square().mean()", "L1"),
    _op("attention scales elsewhere for several rows", reference.attention,
        "torch.bmm(grouped, k.permute(1, 2, 0)) * scale",
        "torch.bmm(grouped * 0.3, k.permute(1, 2, 0)) * (scale / 0.3)"
        " if len(q) > 1 else torch.bmm(grouped, k.permute(1, 2, 0)) * scale", "L1a"),
    _op("activations of a pass share a scale", scheme.quantize_rows, *_SHARED, "L1", format="w8a8"),
    _op("cached rows of a pass share a scale", scheme.quantize_rows, *_SHARED, "C1", "L2", kv="int8"),
    # num_cached keeps as many rows as reserving, which counts blocks, does not notice.
    _text("a preempted sequence keeps its cache", Scheduler._preempt, "self.blocks.release(seq)",
        "self.blocks.forget(seq)\n    self.blocks.trim(seq, 0)\n"
        "    seq.num_cached = min(seq.num_cached, (len(seq) - 1) % self.blocks.block_size)", "L6"),
    _text("a finished sequence keeps its blocks", Scheduler.finish, "self.blocks.release(seq)", "pass", "C2"),
    _text("an end inside a round is missed", Running.take, "if reason is not None:",
        "if reason is not None and base + taken == len(self.seq):", "S1"),
    _text("one token more than asked for", Running._end, "num_output >= params.max_tokens",
        "num_output > params.max_tokens", "S1"),
    _text("allowed tokens are not heeded", sampling.adjust, "row[:] = -np.inf", "pass"),
    _text("every other banned token is forgotten", sampling.adjust, "for t in banned if", "for t in banned[::2] if"),
    _text("the least length counts the prompt", sampling.adjust, "0 <= num_written", "0 <= len(seq)"),
    _text("the least length forgets the draft", sampling.adjust, "num_written <", "seq.num_output <"),
    _text("prompts that are scored count as written", sampling._written, "path[max(0, -seq.num_output) :]", "path",
        "P2"),
    _text("what was scored counts as written", _COUNT, "max(state.num_seen, seq.num_prompt)", "state.num_seen", "P2"),
    _text("a bias counts twice", sampling.adjust, "row[token] += bias", "row[token] += 2 * bias"),
    _text("repetition raises high logits", sampling._penalize, _EACH, _EACH.replace("/", "*")),
    _text("repetition forgets the prompt", sampling._penalize, "flatnonzero(seen | in_prompt)", "flatnonzero(seen)"),
    _text("no penalty of presence", sampling._penalize, " + params.presence_penalty", ""),
    _text("frequency is presence", sampling._penalize, "params.frequency_penalty * counts[index]",
        "params.frequency_penalty"),
    _text("a token counts once however often", _COUNT, "state.counts[token] += 1", "state.counts[token] = 1"),
    _text("min-p is its root", sampling._floor, "np.log(params.min_p)", "np.log(params.min_p) / 2"),
    _text("no temperature below 0.3", sampling._divisor, "params.temperature, _COLDEST", "params.temperature, 0.3"),
    _text("greedy texts heed grammars alone", sampling.plain_greedy, "shaped_by_model(seq)", "seq.grammar is None"),
    _native("noise of the next position", "noise_key(seed, position)", "noise_key(seed, position + 1)"),
    _native("one token too many of top-k", "params.top_k,", "params.top_k + (params.top_k > 0),"),
    _native("no temperature", "_divisor(params),", "1.0,"),
    _native("no top-p", "params.top_p)", "1.0)"),
    _native("no min-p", "_floor(params),", "-np.inf,"),
    _text("a grammar rules nothing out", sampling._allow, "row.fill(-np.inf)", "pass"),
    _text("a grammar forgets the draft", sampling.adjusted, _GRAMMAR, "seq.grammar.allowed(seq.output_token_ids, [])"),
    _text("a grammar forgets the first token", Choice.allowed, "[*output, *path]", "[*output, *path][1:]"),
    _text("a text may end before its grammar", Choice._tokens, "if len(self._choices[begin]) == size", "if True"),
    _text("a grammar mixes its places up", Choice.allowed, "(begin, len(written))", "(begin, 0)"),
    _op("a node's position is one too high", batch.build_batch, "[kv_len + d for d in depths]",
        "[kv_len + d + 1 for d in depths]", "L2"),
    _op("first nodes see those before them", batch.ancestor_masks, "1 << i if parent < 0",
        "(2 << i) - 1 if parent < 0", "L2"),
    _text("rows of the second block lie in the first", batch.slots_of, "blocks[i // block_size]",
        "blocks[i // block_size * (i >= 2 * block_size)]", "T1", "L2"),
    _text("a block is known without what comes before it", Prefixes._digests,
        "hashlib.sha256(parent + self._pack(seq.token_ids, i))", "hashlib.sha256(self._pack(seq.token_ids, i))", "P1"),
    _text("tenants share beginnings", Prefixes._digests, 'seq.tenant.encode("utf-8", "surrogatepass")', 'b""', "P1"),
    _text("one row more than was found", BlockManager.adopt, "seq.num_cached = len(seq.blocks) * self.block_size",
        "seq.num_cached = len(seq.blocks) * self.block_size + 1", "L2", "P1"),
    _text("who shares a block does not count", BlockManager.adopt, "self._num_users[block] += 1", "pass", "C2", "P1"),
    _text("a block given out anew is found as the old one", BlockManager.reserve, "self.prefixes.drop(block)", "pass",
        "P1"),
    _text("tokens beyond the end stay", Running.take, "del self.seq.token_ids[base + taken :]", "pass", "S1"),
    _text("a stop string ends a text that is too short", Running._end, "may_stop=num_output >= params.min_tokens",
        "may_stop=True"),
    _text("a stop string across tokens is missed", OutputText.push, "max(0, known - len(s) + 1 - begin)",
        "known - begin"),
    _text("a character of the stop string stays", OutputText.push, "latest[: min(found)]", "latest[: min(found) + 1]"),
    _text("an end token ends nothing", Running._end, "params.ending(self.eos)", "params.stop_token_ids"),
    _text("a token less than asked for", Running._end, "num_output = length - self.seq.num_prompt",
        "num_output = length - self.seq.num_prompt + 1"),
    _text("an aborted request goes on", Engine.abort, "for r in live]", "for r in live[:0]]", "W1"),
    _text("scores of the last chunk alone", Engine._take, "seq.prompt_logprobs += result.logprobs[b]",
        "seq.prompt_logprobs = result.logprobs[b]", "P2"),
    _text("a prompt's last token is chosen anew", verify._walk, "position < len(seq.script)",
        "position + 1 < len(seq.script)", "P2"),
    _text("probabilities do not add up to one", sampling.token_logprob, "np.exp(row).sum()", "np.exp(row).max()", "P2"),
    _text("a draft's blocks stay taken", Followers.release, "self.runner.blocks.release(shadow.seq)", "pass", "C2"),
    _text("a draft never forgets a request", Followers.release, "self._shadows.pop(seq.seq_id, None)",
        "self._shadows.get(seq.seq_id)", "C2"),
    _text("a parallel draft keeps the rows of its masks", ParallelDrafter._draft, "[[] for _ in shadows], out)",
        "[list(range(n - 1)) for n in counts], out)\n    guesses = iter(out.logits.argmax(-1).tolist())\n"
        "    for shadow, n in zip(shadows, counts):\n        shadow.token_ids += [next(guesses) for _ in range(n)]",
        "C1", draft="parallel"),
    _op("cached rows have one scale for all", reference.store_kv, "[index] = new_scales",
        "[index] = new_scales.mean()", "C1", "L2", "B1", kv="int8"),
    _op("a row does not see itself", reference.attention, "torch.arange(positions[t] + 1,",
        "torch.arange(max(1, positions[t]),", "B1"),
    _op("heads read the wrong keys", reference.attention, ".view(k.shape[1], -1, q.shape[2])",
        ".view(-1, k.shape[1], q.shape[2]).transpose(0, 1)"),
    _op("rotation turns one half the other way", reference.rope, "x2 * cos + x1 * sin", "x2 * cos - x1 * sin"),
    _op("a gate is a sigmoid alone", reference.silu_mul, "torch.nn.functional.silu(", "torch.sigmoid("),
    _op("a norm's epsilon is too large", reference.rms_norm, "+ eps", "+ 1e-2"),
    _op("a norm is no number", reference.rms_norm, "* weight", "* weight * float('nan')"),
    _op("a fused gate has other bits", reference.product, "rows.prepared(rms_norm, silu_mul, gelu_mul)",
        "rows.prepared(rms_norm, lambda x: silu_mul(x) * (1 + 1e-6), gelu_mul)"),
    _op("the stream of a layer is not carried on", reference.product, "residual + out", "out", "T1"),
    _op("tokens of a pass change places", reference.embedding, "(w, token_ids)", "(w, token_ids.flip(0))", "L2", "T1"),
    _op("integer rows take the first row's scale", reference._integer_product, "row_scales[t, g]", "row_scales[0, g]",
        "L1", format="w8a8"),
)
# fmt: on
