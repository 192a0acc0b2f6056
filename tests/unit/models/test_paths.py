"""A token's logits have the same bits however it reaches the model: prompt, chunk, decode, chain, tree or batch."""

from itertools import cycle, product

import pytest
import torch
from fixtures_models import VARIANTS, all_logits, backends, feed, make_runner, make_sequence, prompt, tiny_model

from sameseed import registry, scheme
from sameseed.models.config import parse_config
from sameseed.ops import plain_rows
from sameseed.spec.draft import Draft

pytestmark = pytest.mark.bits

KV_FORMATS = [n for n in registry.names("formats") if scheme.get(n).kv_dtype is not None]
CODED = [n for n in KV_FORMATS if n != "fp32"]
KEPT = [[], [0], [1, 4], [1, 4, 6], [0, 2, 3, 5]]  # paths of a tree
every_backend = pytest.mark.parametrize("backend", backends())
every_variant = pytest.mark.parametrize("name", VARIANTS)


@every_backend
@every_variant
def test_token_by_token_equals_the_whole_prompt(name, backend):
    model = tiny_model(backend, name)
    token_ids = prompt(VARIANTS[name].length)
    whole = all_logits(model, token_ids)
    runner, seq = make_runner(model), make_sequence(token_ids[:1])
    rows = [feed(runner, seq, 1)]
    for token in token_ids[1:]:
        seq.token_ids.append(token)
        rows.append(feed(runner, seq, 1))
    assert torch.cat(rows).equal(whole)


def path_to(node, parents):
    """The nodes from the root to `node`, including both."""
    return ([] if parents[node] < 0 else path_to(parents[node], parents)) + [node]


def check_draft(model, token_ids, draft_tokens, parents):
    """Checks that each node's logits are those of its path as a plain sequence; returns the logits of the pass."""
    runner, seq = make_runner(model), make_sequence(token_ids)
    feed(runner, seq, len(token_ids) - 3)
    assert runner.blocks.reserve(seq, len(token_ids) + len(draft_tokens))
    out = runner.forward([seq], Draft.trees([(draft_tokens, parents)]), [3])
    assert out.logits.shape == (1 + len(draft_tokens), model.config.vocab_size)
    assert out.logits[0].equal(all_logits(model, token_ids)[-1])
    for leaf in set(range(len(draft_tokens))) - set(parents):
        path = path_to(leaf, parents)
        alone = all_logits(model, token_ids + [draft_tokens[i] for i in path])[-len(path) :]
        for node, wanted in zip(path, alone, strict=True):
            assert out.logits[1 + node].equal(wanted), f"node {node} of the path {path}"
    return out.logits


@every_backend
@pytest.mark.parametrize("name", [n for n, v in VARIANTS.items() if not parse_config(v.raw).state_shapes])
def test_a_tree_equals_each_path_alone(name, backend):
    #    0        1      siblings at each level, a leaf before its cousin's child, nodes out of depth order
    #  2   3      5
    #  4   6      8
    #      7
    token_ids = prompt(VARIANTS[name].length)
    parents = [-1, -1, 0, 0, 2, 1, 3, 6, 5]
    rows = check_draft(tiny_model(backend, name), token_ids, prompt(9, seed=7), parents)
    assert not rows[3].equal(rows[4])  # siblings have different logits


@every_backend
@pytest.mark.parametrize(
    ("kept", "kv_format"),
    [*product(KEPT, ["fp32"]), *zip(cycle(KEPT[3:]), CODED), *zip(cycle(KEPT[:3]), CODED)],
    ids=str,
)
def test_after_commit_the_cache_is_as_if_never_drafted(kept, kv_format, backend):
    model = tiny_model(backend, "qwen3")
    token_ids, parents = prompt(18), [-1, -1, 0, 2, 1, 3, 4, 5]
    tokens = prompt(8, seed=9)
    runner, seq = make_runner(model, 4, 64, kv_format), make_sequence(token_ids)
    assert runner.blocks.reserve(seq, len(token_ids) + len(tokens))
    out = runner.forward([seq], Draft.trees([(tokens, parents)]), [len(token_ids)])
    runner.commit([seq], [len(token_ids)], [kept], out)
    seq.token_ids += [tokens[i] for i in kept] + [33]
    assert seq.num_cached == len(token_ids) + len(kept)
    runner.blocks.trim(seq, seq.num_cached)
    assert feed(runner, seq, 1)[0].equal(all_logits(model, seq.token_ids, kv_format)[-1])


@every_backend
def test_captured_hidden_states_lead_to_the_logits(backend):
    """The last layer's output, normalized and multiplied by the LM head, is the logits; kept rows are in order."""
    model = tiny_model(backend, "llama3.2")
    last = model.config.num_layers - 1
    runner, seq = make_runner(model), make_sequence(prompt(9))
    runner.captures = (0, last)
    assert runner.blocks.reserve(seq, 12)
    out = runner.forward([seq], Draft.trees([([4, 5, 6], [-1, -1, 1])]), [9])
    width = model.config.hidden_size
    assert out.hidden is not None and out.hidden.shape == (12, 2 * width)
    kept = runner.commit([seq], [9], [[1, 2]], out)
    assert kept is not None and kept.equal(out.hidden[[*range(9), 10, 11]])
    final = model.ops.rms_norm(kept[:, width:], model.weights.norm, model.config.rms_eps)
    logits = model.ops.product(plain_rows(final), model.weights.lm_head)
    assert logits.equal(all_logits(model, [*seq.token_ids, 5, 6]))
