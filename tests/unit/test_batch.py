"""Batch: rows, positions, slots and masks of one pass, by example and against their definition."""

import math
import random
from dataclasses import replace

import torch
from fixtures_device import DEVICE, counted_waits, pretended_device
from fixtures_ops import Part, make_pass

from sameseed.batch import GREEDY, MAX_NODES, UNKNOWN, Draw, Draws, Rows, build_batch
from sameseed.ops import reference


def test_the_64th_node_uses_the_sign_bit():
    parents = list(range(-1, MAX_NODES - 1))
    batch = build_batch([Rows([1], 0, [2] * MAX_NODES, parents, list(range(5)), True)], 16)
    assert batch.tree_mask[-1].item() == -1, "all 64 bits"
    wide = build_batch([Rows([1], 0, [2] * MAX_NODES, [-1] * MAX_NODES, list(range(5)), True)], 16)
    assert wide.tree_mask[-1].item() == -(2**63), "only its own bit"


def test_random_against_the_definition():
    rng = random.Random(3)
    for _ in range(50):
        size = rng.choice([1, 3, 16])
        every, free = [], list(range(400))
        rng.shuffle(free)
        for _ in range(rng.randint(1, 5)):
            num_pending, cached, n = rng.randint(1, 6), rng.randint(0, 20), rng.choice([0, 0, 5, 12])
            parents = [rng.randint(-1, i - 1) for i in range(n)]
            blocks = [free.pop() for _ in range(-(-(cached + num_pending + n) // size))]
            tokens = [rng.randrange(99) for _ in range(num_pending + n)]
            wants = n > 0 or rng.random() < 0.5
            every.append(Rows(tokens[:num_pending], cached, tokens[num_pending:], parents, blocks, wants))
        batch = build_batch(every, size)
        assert len(set(batch.slots.tolist())) == batch.num_rows, "no two rows share a slot"
        logit_rows = []
        for b, r in enumerate(every):
            first, known = int(batch.row_offsets[b]), r.num_cached + len(r.pending)
            assert (int(batch.kv_lens[b]), int(batch.num_pending[b])) == (known, len(r.pending))
            assert batch.block_tables[b, : len(r.blocks)].tolist() == r.blocks
            for i, token in enumerate([*r.pending, *r.nodes]):
                t, index, node = first + i, r.num_cached + i, i - len(r.pending)
                assert int(batch.token_ids[t]) == token
                assert int(batch.slots[t]) == r.blocks[index // size] * size + index % size
                path, at = [], node
                while node >= 0 and at >= 0:
                    path.append(at)
                    at = r.parents[at]
                assert int(batch.positions[t]) == (index if node < 0 else known + len(path) - 1)
                if batch.tree_mask is not None:
                    assert int(batch.tree_mask[t]) == sum(1 << j for j in path)
            if r.wants_logits:
                logit_rows += range(first + len(r.pending) - 1, first + len(r.pending) + len(r.nodes))
        assert batch.logit_rows.tolist() == logit_rows


HOST = ("most", "shares", "sure")


def test_a_batch_goes_to_a_device_in_one_copy():
    """All of it is copied, with tree mask, key positions and draws; each tensor begins at a multiple of 16 bytes."""
    rows = [Rows([1, 2], 8, [3, 4], [-1, 0], [5, 6, 7], True, unseen=(0, 1)), Rows([7], 2, [], [], [2], True)]
    drawn = [Draw(2**64 - 5, 0.5, -3.0, False, 4, 0.9), GREEDY, Draw(7, 1.0, -math.inf, False), GREEDY]
    batch = replace(build_batch(rows, 4), draws=Draws.of(drawn))
    with pretended_device(), counted_waits() as found:
        there = batch.on(DEVICE)
        assert list(found.values()) == [1]
        pairs = [(getattr(there, name), x) for name, x in vars(batch).items() if isinstance(x, torch.Tensor)]
        pairs += [(getattr(there.draws, name), x) for name, x in vars(batch.draws).items() if name not in HOST]
        for moved, tensor in pairs:
            assert moved.device == DEVICE and moved.dtype == tensor.dtype and moved.cpu().equal(tensor)
            assert moved.storage_offset() * moved.element_size() % 16 == 0
        assert there.on(DEVICE) is there
        assert there.draws is not None and (there.draws.most, there.draws.shares) == (4, ((0, 0.9),))
    assert batch.on(torch.device("cpu")) is batch


def test_tokens_that_only_the_device_knows_stay_there():
    batch = build_batch([Rows([5, UNKNOWN], 0, [UNKNOWN], [-1], [1], True), Rows([7], 0, [], [], [2], True)], 4)
    with pretended_device():
        late = torch.tensor([8, 9], dtype=torch.int32, device=DEVICE)
        with counted_waits() as found:
            there = batch.with_late(late).on(DEVICE)
        assert list(found.values()) == [1] and there.token_ids.tolist() == [5, 8, 9, 7]


def test_drafts_that_do_not_branch_may_stand_for_known_tokens():
    """The rows of such drafts see the same keys in the same order, so attention gives the same bits."""
    rng, found = random.Random(5), 0
    for _ in range(40):
        parts = []
        for _ in range(rng.randint(1, 4)):
            n = rng.choice([0, 1, 4, 9])
            chain = rng.random() < 0.6
            parents = range(-1, n - 1) if chain else [rng.randint(-1, i - 1) for i in range(n)]
            parts.append(Part(rng.randint(0, 40), rng.randint(1, 5), list(parents)))
        p = make_pass(parts)
        batch = p.batch.without_chains()
        found += batch is not p.batch and batch.tree_mask is not None
        straight = [part.parents == list(range(-1, len(part.parents) - 1)) for part in parts]
        assert (batch.tree_mask is None) == all(straight)
        for b, part in enumerate(parts):
            expected = (part.stored, part.pending + len(part.parents)) if straight[b] else (part.kv_len, part.pending)
            assert (int(batch.kv_lens[b]), int(batch.num_pending[b])) == expected
        for window in (None, 8):
            got = reference.attention(p.q, p.layer, batch, 0.3, window)
            assert torch.equal(got, reference.attention(p.q, p.layer, p.batch, 0.3, window))
    assert found, "batches of both kinds"


def test_a_node_whose_ancestors_are_stored_stands_for_a_known_token_too():
    batch = build_batch([Rows([1, 2], 3, [7, 8, 9], [-1, 0, 1], [0, 1, 2], True)], 4)
    last = {name: getattr(batch, name)[-1:] for name in ("token_ids", "positions", "slots", "tree_mask")}
    last |= {"row_offsets": torch.tensor([0, 1], dtype=torch.int32), "num_pending": torch.zeros(1, dtype=torch.int32)}
    one = replace(batch, **last)
    found = one.without_chains()
    assert (found.kv_lens.tolist(), found.num_pending.tolist(), found.tree_mask) == ([8], [1], None)
