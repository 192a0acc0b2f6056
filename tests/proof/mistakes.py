"""Known mistakes of verification, masks, cache, noise, truncation, kernels and ends, as mutants of the source."""

from proof.mutant import REFERENCE, Mutant
from sameseed import batch, scheme
from sameseed.engine.running import Running
from sameseed.engine.scheduler import Scheduler
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


def _walk(name, old, new, *checks):
    return Mutant(name, verify._walk, old, new, checks or ("L3",))


def _commit(name, old, new):
    return Mutant(f"commit {name}", ModelRunner.commit, old, new, ("C1", "L3", "L6"))


def _mask(name, old, new):
    return Mutant(name, batch.ancestor_masks, old, new, ("L2", "L3"), REFERENCE)


def _product(name, new, check="L1"):
    return Mutant(name, reference.product, _PRODUCT, new, (check,), REFERENCE)


MISTAKES = (
    _walk(
        "accepts one token too many",
        f"path.tokens.append(token)\n        {_CHILD}",
        f"{_CHILD}\n        if child is None and node < 0 and draft_tokens:\n"
        "            child, token = 0, draft_tokens[0]\n        path.tokens.append(token)",
    ),
    _walk("accepts any guess", _CHILD, "child = next((c for (p, _), c in children.items() if p == node), None)"),
    _walk("accepts by a threshold instead of the rule", _CHOOSE, _GUESS.format(limit="0.25"), "L6", "L5"),
    _walk(
        "rejects by probability and forgets the residual",  # min(1, p / q) with q = 1, then a draw from all of p
        _CHOOSE,
        _GUESS.format(limit=_UNIFORM),
        "L6",
        "L5",
    ),
    _walk("takes the bonus token from the row before", _AT, "at, position = max(node, 0),"),
    _walk("takes a node's row by its depth in the tree", _AT, "at, position = len(path.nodes),"),
    Mutant("loses count of the rows of a batch", verify.verify, "row = end", "row += 1 + len(path.nodes)", ("L3",)),
    _walk(
        "forgets the drafted path: noise and penalties are used twice",
        _CHOOSE,
        _CHOOSE.replace("path.tokens", "[]"),
        "L6",
    ),
    Mutant(
        "mixes the place in the batch into the seed",
        verify.verify,
        _WALK,
        f"seq.seed += b\n                {_WALK}\n                seq.seed -= b",
        ("L6",),
    ),
    _walk(
        "log-probabilities forget the drafted path",
        "token_logprob(table[at], seq, path.tokens,",
        "token_logprob(table[at], seq, [],",
        "L9",
    ),
    _walk("rejects every guess", _CHILD, "child = None", "A1"),
    _commit(
        "keeps a rejected row",
        "seq.num_cached = known + len(nodes[b])",
        "seq.num_cached = known + len(nodes[b])\n"
        "        last = nodes[b][-1] + 1 if nodes[b] else 0\n"
        "        if 0 < last < output.row_offsets[b + 1] - output.row_offsets[b] - num_pending[b]:\n"
        "            src.append(self._slot(seq, known + last))\n"
        "            dst.append(self._slot(seq, seq.num_cached - 1))",
    ),
    _commit("moves nothing", "if src:", "if False:"),
    _commit(
        "to the place after",
        "dst.append(self._slot(seq, known + place))",
        "dst.append(self._slot(seq, known + place + 1))",
    ),
    _commit(
        "from the place before",
        "src.append(self._slot(seq, known + node))",
        "src.append(self._slot(seq, known + node - 1))",
    ),
    _mask(
        "the tree mask is shifted by a bit", "return masks,", "return [m >> 1 | 1 << i for i, m in enumerate(masks)],"
    ),
    _mask("a node sees its siblings", "masks[parent] | 1 << i", "masks[parent] | (2 << i) - 1"),
    _mask("a node does not see its grandparents", "masks[parent] | 1 << i", "1 << parent | 1 << i"),
    _mask("a node's position is its place, not its depth", "depths[parent] + 1", "i"),
    Mutant(
        "moves keys and forgets values", reference.move_kv, "_flat(layer)", "_flat(layer)[::2]", ("C1", "L3"), REFERENCE
    ),
    Mutant("noise ignores the position", sampling.noise_key, "position * ", "0 * ", ("T1",)),
    Mutant("noise ignores the seed", sampling.noise_key, "seed & _MASK", "0", ("T1",)),
    Mutant("noise ignores the token", sampling.gumbel_noise, "z += _ONE", "z[:] = _ONE", ("T1",)),
    Mutant("noise is uniform, not Gumbel", sampling.gumbel_noise, "for _ in range(2):", "for _ in range(0):", ("T1",)),
    Mutant(
        "top-k keeps one token too many",
        sampling.survivors,
        "-params.top_k)[-params.top_k]",
        "-params.top_k - 1)[-params.top_k - 1]",
        ("T1",),
    ),
    Mutant(
        "top-p stops too early", sampling.survivors, "weights, params.top_p", "weights, params.top_p * 0.9", ("T1",)
    ),
    Mutant(
        "the temperature is applied twice",
        sampling.survivors,
        "_scaled(row, params)",
        "_scaled(row, params) / _divisor(params)",
        ("T1",),
    ),
    Mutant("penalties do not see the draft", sampling._penalize, "if written:", "if False:", ("L9", "L6")),
    Mutant("penalties of a draft stay", sampling._penalize, "counts = counts.copy()", "pass", ("L9", "L6")),
    _product(
        "split-K: several rows add up in two halves",
        f"width = -(-weight.shape[1] // (1 + (len(x) > 1)))\n        {_PARTS}",
    ),
    _product(
        "rows at odd places add up backwards",
        "out = torch.stack([torch.mv(weight.flip(1), r.flip(0)) if t % 2 else torch.mv(weight, r.clone())"
        " for t, r in enumerate(x)])",
    ),
    _product(
        "chunks of K depend on the number of threads",
        f"width = -(-weight.shape[1] // torch.get_num_threads())\n        {_PARTS}",
    ),
    _product(
        "a product forgets the last column",
        "out = _by_row(lambda r: torch.mv(weight[:, :-1], r[:-1]), x, w.shape[0])",
        "B1",
    ),
    Mutant(
        "a norm reads another row",
        reference.rms_norm,
        "row.square().mean()",
        "(row + 1e-3 * x[-1]).square().mean()",
        ("L1",),
        REFERENCE,
    ),
    Mutant(
        "attention scales elsewhere for several rows",
        reference.attention,
        "torch.bmm(grouped, k.permute(1, 2, 0)) * scale",
        "torch.bmm(grouped * 0.3, k.permute(1, 2, 0)) * (scale / 0.3)"
        " if len(q) > 1 else torch.bmm(grouped, k.permute(1, 2, 0)) * scale",
        ("L1a",),
        REFERENCE,
    ),
    *(
        Mutant(
            name,
            scheme.quantize_rows,
            "x.abs().amax(-1, keepdim=True)",
            "x.abs().amax().expand(*x.shape[:-1], 1)",
            checks,
            settings | REFERENCE,
        )
        for name, checks, settings in (
            ("activations of a pass share a scale", ("L1",), {"format": "w8a8"}),
            ("cached rows of a pass share a scale", ("C1", "L2"), {"kv": "int8"}),
        )
    ),
    Mutant(
        "a preempted sequence keeps its cache",
        Scheduler._preempt,
        "self.blocks.release(seq)",
        # num_cached keeps as many rows as reserving, which counts blocks, does not notice.
        "self.blocks.forget(seq)\n    self.blocks.trim(seq, 0)\n"
        "    seq.num_cached = min(seq.num_cached, (len(seq) - 1) % self.blocks.block_size)",
        ("L6",),
    ),
    Mutant("a finished sequence keeps its blocks", Scheduler.finish, "self.blocks.release(seq)", "pass", ("C2",)),
    Mutant(
        "an end inside a round is missed",
        Running.take,
        "if reason is not None:",
        "if reason is not None and base + taken == len(self.seq):",
        ("S1",),
    ),
    Mutant(
        "one token more than asked for",
        Running._end,
        "num_output >= params.max_tokens",
        "num_output > params.max_tokens",
        ("S1",),
    ),
)
