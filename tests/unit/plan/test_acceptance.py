from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lawkit import random_prompts

from sameseed import store
from sameseed.config import SpecConfig, parse_draft
from sameseed.drafters.draft_model import DraftModelDrafter
from sameseed.engine.build import build_engine
from sameseed.engine.engine import Engine
from sameseed.engine.settings import make_config
from sameseed.errors import ConfigError, RequestError
from sameseed.measure.workload import DEFAULT_PROMPTS, Workload, read_prompts, without_past
from sameseed.models.loader import load_tokenizer, resolve_model
from sameseed.plan.acceptance import Replay, judge, sizes_up_to
from sameseed.plan.replay import replay
from sameseed.plan.replayer import Replayer
from sameseed.plan.texts import Texts
from sameseed.request import Request, SamplingParams, Sequence
from sameseed.spec.draft import Draft
from sameseed.spec.drafter import Drafter

LENGTH = 24
MOST = 6
SAMPLINGS = {"greedy": {}, "sampled": {"temperature": 0.8}, "penalties": {"temperature": 0.8, "frequency_penalty": 0.5}}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An acceptance store for this test only."""
    monkeypatch.setenv(store.VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def workload_of(sampling: dict[str, Any], prompts: Any = None, **changed: Any) -> Workload:
    prompts = prompts or [*map(tuple, random_prompts(3)), (7, 8, 9, 7, 8, 9, 7, 8, 9, 7)]
    return Workload("test", tuple(prompts), SamplingParams(**{"max_tokens": LENGTH, "seed": 5, **sampling, **changed}))


def run_of(engine: Engine, texts: Texts) -> list[list[tuple[int, int]]]:
    """Drafted and accepted tokens of each draft of a real run, with all texts together."""
    rounds: dict[int, list[tuple[int, int]]] = {}
    for i, text in enumerate(texts):
        engine.add(Request("run", text.prompt, text.params, text.seed, i, detailed=True, streamed=False))
    while engine.has_work:
        for delta in engine.step():
            if delta.completion is not None:
                assert delta.completion.token_ids == texts.items[delta.index].tokens
                rounds[delta.index] = delta.completion.metrics.spec.rounds or []
    return [rounds[i] for i in range(len(texts))]


def rounds_of(found: Replay, size: int) -> list[list[tuple[int, int]]]:
    """The same rounds, put together from a replay."""
    column, rounds = found.column(size), []
    for t in range(len(found.offsets) - 1):
        at, own = int(found.offsets[t]), []
        while at < found.offsets[t + 1]:
            nodes, accepted = int(found.nodes[at, column]), int(found.accepted[at, column])
            own += [(nodes, accepted)] if nodes else []
            at += accepted + 1
        rounds.append(own)
    return rounds


def assert_same_rounds(
    model: str, spec: SpecConfig, workload: Workload, sizes: tuple[int, ...] = (1, 2, 4, MOST)
) -> None:
    """A replay gives the rounds of a real run, one by one, and leaves all cache blocks free."""
    replayer = Replayer(model, batch_size=3)
    texts = replayer.texts(workload)
    found = replayer.replay(spec, texts, MOST)
    assert (np.diff(found.offsets) + 1).tolist() == [len(t.tokens) for t in texts]
    for size in sizes:
        spec_of_size = replace(without_past(spec), num_draft_tokens=size)
        config = replace(replayer.config, spec=spec_of_size, max_num_seqs=8)
        engine = build_engine(model, replace(config, max_model_len=texts.longest + 128))
        real = run_of(engine, texts)
        for t, (mine, its) in enumerate(zip(rounds_of(found, size), real, strict=True)):
            # The last draft of a run may reach past the text's end, where a replay knows no tokens.
            assert mine[:-1] == its[:-1], (size, t)
            assert [n for n, _ in mine] == [n for n, _ in its]
            assert all(a <= b for (_, a), (_, b) in zip(mine[-1:], its[-1:], strict=True))
        drafts = [r for rounds in real for r in rounds]
        rates = found.rates(size)
        assert rates.num_rounds >= len(drafts)
        assert rates.mean_acceptance_length == pytest.approx(1 + sum(a for _, a in drafts) / len(drafts), abs=0.2)
    blocks = replayer.target.blocks if replayer.target else None
    assert blocks is not None
    assert blocks.num_free == blocks.num_blocks


DRAFTS = ["ngram", "suffix", "draft", "head", "suffix + draft", "ngram > draft", "self_quant", "ngram + head"]


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("draft", DRAFTS)
def test_a_replay_tells_what_a_run_does(pair_folders: tuple[Path, Path], draft: str, sampling: dict[str, Any]) -> None:
    target, small = pair_folders
    words = {"draft": str(small), "head": str(target.parent / "head"), "self_quant": "self_quant"}
    spec = parse_draft(" ".join(words.get(word, word) for word in draft.split()))
    if draft == "self_quant":
        spec = replace(spec, format="w8a8")
    assert_same_rounds(str(target), spec, workload_of(sampling))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("draft", ["embedded-draft", "embedded-head", "ngram", "suffix + embedded-draft"])
def test_the_embedded_pair(draft: str, temperature: float) -> None:
    tokenizer = load_tokenizer(resolve_model("embedded"))
    prompts = tuple(p.encode(tokenizer) for p in read_prompts(DEFAULT_PROMPTS, 3))
    workload = workload_of({"temperature": temperature}, prompts)
    assert_same_rounds("embedded", parse_draft(draft), workload, (4,))


def test_company_and_the_largest_size_change_nothing(pair_folders: tuple[Path, Path]) -> None:
    target, draft = map(str, pair_folders)
    alone, together = Replayer(target, batch_size=1), Replayer(target, batch_size=4)
    texts = together.texts(workload_of({"temperature": 0.8}))
    spec = parse_draft(f"suffix + {draft}")
    whole = together.replay(spec, texts, MOST)
    for found in (together.replay(spec, texts, 4), alone.replay(spec, replace(texts, key=""), 4)):
        assert found.sizes == (1, 2, 3, 4)
        for name in ("accepted", "nodes", "steps"):
            assert np.array_equal(getattr(found, name), getattr(whole, name)[:, :4])


@pytest.mark.parametrize("draft", ["draft", "self_quant"])
def test_a_text_that_fills_the_context(pair_folders: tuple[Path, Path], draft: str) -> None:
    target, small = map(str, pair_folders)
    spec = SpecConfig("self_quant", format="w8a8") if draft == "self_quant" else SpecConfig("draft_model", small)
    replayer = Replayer(target, {"max_model_len": 32}, batch_size=1)
    texts = replayer.texts(workload_of({}, [(1,) * 16, (2, 3, 4) * 5], max_tokens=16))
    assert texts.longest <= 32
    found = replayer.replay(spec, texts, MOST)
    assert (np.diff(found.offsets) + 1).tolist() == [len(t.tokens) for t in texts]
    assert found.nodes.max() == MOST


def test_texts_are_written_once_and_drafts_replayed_once(
    pair_folders: tuple[Path, Path], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = map(str, pair_folders)
    workload, spec = workload_of({"temperature": 0.8}), SpecConfig("draft_model", draft)
    replayer = Replayer(target)
    texts = replayer.texts(workload)
    found = replayer.replay(spec, texts, 4)
    with monkeypatch.context() as context:
        context.setattr("sameseed.plan.replayer.build_engine", None)  # a load would fail
        again = Replayer(target)
        assert again.texts(workload) == texts
        kept = again.replay(spec, texts, 3)
        assert kept.sizes == (1, 2, 3)
        assert np.array_equal(kept.accepted, found.accepted[:, :3])
        for other in (replace(spec, options={"vocabulary": "100"}), replace(spec, format="w8a8")):
            with pytest.raises(TypeError):
                again.replay(other, texts, 4)
    for file in cache.rglob("*.npz"):
        file.write_bytes(file.read_bytes()[:-40])
    assert Replayer(target).texts(workload) == texts
    assert np.array_equal(Replayer(target).replay(spec, texts, 4).accepted, found.accepted)
    assert len(list(cache.rglob("*"))) == 4, "two files in two folders: nothing half written is left"


def test_a_folder_that_cannot_be_written_costs_time_only(
    pair_folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv(store.VARIABLE, str(tmp_path / "file"))
    assert Replayer(str(pair_folders[0])).texts(workload_of({}, max_tokens=3))
    assert store.VARIABLE in caplog.text


def test_where_measurements_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(store.VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert store.cache_folder() == tmp_path / "sameseed"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert store.cache_folder() == Path.home() / ".cache" / "sameseed"


def test_a_digest_of_weights_sees_what_changed(tmp_path: Path, pair_folders: tuple[Path, Path]) -> None:
    keys = [store.weights_key(folder) for folder in pair_folders]
    assert keys[0] != keys[1]
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in pair_folders[0].iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    assert store.weights_key(copy) == keys[0]


def test_a_drafter_of_ones_own_is_replayed_and_not_kept(pair_folders: tuple[Path, Path], cache: Path) -> None:
    class Knowing(Drafter):
        """Drafts a tree without probabilities: the last token again, and token 5."""

        branches = True

        def propose(self, seqs: Seq[Sequence], num_draft: Seq[int]) -> Draft:
            return Draft.trees([([s.token_ids[-1], 5][:k], [-1, -1][:k]) for s, k in zip(seqs, num_draft, strict=True)])

    replayer = Replayer(str(pair_folders[0]))
    texts = replayer.texts(workload_of({}))
    found = replayer.replay(SpecConfig("Knowing", drafter=Knowing()), texts, 4)
    assert set(found.nodes[:, 0]) <= {0, 1}
    assert found.nodes[:, 3].max() == 2
    assert not (cache / "replays").exists()


def test_past_requests_and_stores_are_left_alone(pair_folders: tuple[Path, Path], tmp_path: Path) -> None:
    replayer = Replayer(str(pair_folders[0]), batch_size=1)
    texts = replayer.texts(workload_of({}, [(5, 6, 7, 8)] * 3))
    file = tmp_path / "past"
    spec = SpecConfig("suffix", options={"past": "all", "store": str(file)})
    learned, alone = replayer.replay(spec, texts, 4), replayer.replay(SpecConfig("suffix"), texts, 4)
    assert not file.exists()
    assert alone.accepted.sum() < learned.accepted.sum(), "three equal texts: the others know the first, if asked to"
    own = np.split(alone.accepted, alone.offsets[1:-1])
    assert np.array_equal(own[0], own[2])


def test_bad_input(pair_folders: tuple[Path, Path]) -> None:
    replayer = Replayer(str(pair_folders[0]))
    with pytest.raises(ConfigError, match="ignore_eos"):
        replayer.texts(workload_of({}, ignore_eos=True))
    with pytest.raises(ConfigError, match="no prompts"):
        replayer.texts(replace(workload_of({}), prompts=()))
    with pytest.raises(RequestError, match="vocabulary"):
        replayer.texts(workload_of({}, [(10**6,)]))
    texts = replayer.texts(workload_of({}))
    for spec in (SpecConfig(), SpecConfig("none")):
        with pytest.raises(ConfigError, match="plain decoding has no drafts"):
            replayer.replay(spec, texts, 4)
    with pytest.raises(ConfigError, match=r"1\.\.64, got 65"):
        replayer.replay(SpecConfig("ngram"), texts, 65)
    engine = build_engine(str(pair_folders[0]), make_config("ngram", max_model_len=64))
    with pytest.raises(ConfigError, match="of 64; raise max_model_len"):
        replay(engine, SpecConfig("ngram"), replace(texts, items=(replace(texts.items[0], prompt=(1,) * 60),)), 4)
    engine.add(Request("r", (1, 2), SamplingParams(), 0))
    with pytest.raises(ConfigError, match="serves requests"):
        replay(engine, SpecConfig("ngram"), texts, 4)


def test_sizes() -> None:
    assert sizes_up_to(1) == (1,)
    assert sizes_up_to(5) == (1, 2, 3, 4, 5)
    assert sizes_up_to(64)[-3:] == (32, 48, 64)


def test_a_tree_is_cut_to_its_likeliest_nodes() -> None:
    #        0 (a, .6)        1 (b, .3)
    #     2 (c, .2)  3 (d, .4)   4 (c, .1)
    draft = ([10, 11, 12, 13, 12], [-1, -1, 0, 0, 1])
    sure = [0.6, 0.3, 0.2, 0.4, 0.1]
    found = judge(draft, sure, [0, 0, 0, 1, 0], 2, (10, 12, 9), (1, 2, 3, 4, 5))
    assert found.accepted == [1, 1, 1, 2, 2]
    assert found.nodes == [1, 2, 3, 4, 5]
    assert found.steps == [[1, 0], [1, 2], [1, 2], [2, 2], [2, 2]]
    assert judge(draft, sure, [0] * 5, 1, (11, 12), (2, 3, 5)).accepted == [0, 1, 2]
    assert judge(draft, None, [0] * 5, 1, (10, 12), (2, 3, 5)).accepted == [1, 2, 2]
    assert judge(([], []), None, [], 1, (1, 2), (1, 2)).nodes == [0, 0]


def test_rates_are_those_of_a_run() -> None:
    column = np.array([[2], [1], [0], [0], [1], [0]], np.int16)
    nodes = np.array([[2], [2], [2], [0], [2], [2]], np.int16)
    texts = Replay((2,), np.array([0, 4, 6]), column, nodes, nodes[:, :, None])
    # Rounds at 0 (2 of 2) and 3 (none) of the first text, at 4 (1 of 2) of the second.
    assert texts.rounds(2).tolist() == [0, 4, 3]
    rates = texts.rates(2)
    assert (rates.num_rounds, rates.undrafted) == (3, pytest.approx(1 / 3))
    assert rates.marginal_accept_rates == pytest.approx((2 / 3, 1 / 3))
    assert rates.conditional_accept_rates == pytest.approx((2 / 3, 1 / 2))
    assert (rates.mean_accept_length, rates.mean_acceptance_length, rates.acceptance_rate) == (2.0, 2.5, 0.75)
    with pytest.raises(ConfigError, match="choose one of 2"):
        texts.rates(3)


def test_a_model_is_asked_once_a_position(pair_folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = map(str, pair_folders)
    replayer = Replayer(target)
    texts = replayer.texts(workload_of({}, [(1, 2, 3, 4)]))
    asked: list[list[int]] = []
    propose = DraftModelDrafter.propose

    def counted(self: DraftModelDrafter, seqs: Seq[Sequence], num_draft: Seq[int]) -> Draft:
        asked.append(list(num_draft))
        return propose(self, seqs, num_draft)

    monkeypatch.setattr(DraftModelDrafter, "propose", counted)
    found = replayer.replay(parse_draft(f"ngram + {draft}"), texts, 4)
    assert 0 < len(asked) <= len(found.accepted)
    assert max(map(max, asked)) == 4
