"""On a GPU the texts of a step are made during the next step's pass: the same text, in the same order, nothing lost."""

from collections import defaultdict

import pytest
from lawkit import make_engine, random_prompts

from sameseed.models.runner import ModelRunner
from sameseed.request import Delta, FinishReason, Request, SamplingParams

PROMPTS = random_prompts(5)
LATE = property(lambda self: True)


def asked(engine, **changes):
    for i, prompt in enumerate(PROMPTS):
        stop = ("e", "1a") if i == 1 else ()
        params = SamplingParams(max_tokens=9 + i, seed=i, temperature=0.8, stop=stop, min_tokens=4, **changes)
        engine.add(Request(str(i), prompt, params, seed=i, streamed=i != 2))


def summed(deltas):
    """Text, tokens, levels and offsets of each request's deltas; the last one must be the one that completes it."""
    by_request = defaultdict[str, list[Delta]](list)
    for delta in deltas:
        by_request[delta.request_id].append(delta)
    for parts in by_request.values():
        assert [d.completion is not None for d in parts] == [False] * (len(parts) - 1) + [True]
    return {
        name: (
            "".join(d.text for d in parts), sum((d.token_ids for d in parts), ()), sum((d.levels for d in parts), ()),
            sum((d.text_offset for d in parts), ()),
        )
        for name, parts in by_request.items()
    }  # fmt: skip


def written(engine, send=False):
    deltas = []
    while engine.has_work:
        deltas += engine.step(deltas.extend if send else None)
    return deltas


@pytest.mark.parametrize("send", [False, True])
@pytest.mark.parametrize("method", ["none", "ngram", "draft_model"])
def test_late_deltas_are_the_same_deltas(pair, monkeypatch, method, send):
    now = make_engine(pair, method, k=3, seqs=3)
    asked(now)
    wanted = summed(written(now))
    late = make_engine(pair, method, k=3, seqs=3)
    monkeypatch.setattr(ModelRunner, "takes_late", LATE)
    asked(late)
    assert summed(written(late, send)) == wanted and len(wanted) == len(PROMPTS)


def test_deltas_are_sent_before_the_wait(pair, monkeypatch):
    """A step's deltas leave between the next pass's launch and its end, one delta a sequence."""
    events = []
    engine = make_engine(pair, "none", seqs=5)
    monkeypatch.setattr(ModelRunner, "takes_late", LATE)
    launch, forward = engine.runner.model.run, engine.runner.forward
    monkeypatch.setattr(engine.runner.model, "run", lambda *a: (launch(*a), events.append("launched"))[0])
    monkeypatch.setattr(engine.runner, "forward", lambda *a: (forward(*a), events.append("ended"))[0])
    engine.add(Request("a", PROMPTS[0], SamplingParams(max_tokens=4, ignore_eos=True), seed=1, streamed=True))
    send = lambda deltas: events.extend(d.token_ids for d in deltas)  # noqa: E731
    while engine.has_work:
        events += engine.step(send)
    *others, last = events
    assert [e if isinstance(e, str) else len(e) for e in others] == ["launched", "ended", *["launched", 1, "ended"] * 3]
    assert last.completion.finish_reason is FinishReason.LENGTH and len(last.token_ids) == 1


def test_ending_early_loses_no_text(pair, monkeypatch):
    """An abort, or a pass that fails, first gives out what was decided; other requests' texts come later."""
    monkeypatch.setattr(ModelRunner, "takes_late", LATE)
    engine = make_engine(pair, "none", seqs=5)
    asked(engine, ignore_eos=True)
    deltas = [d for _ in range(4) for d in engine.step()]
    ended = engine.abort("0")
    assert {d.request_id for d in ended} == {"0"} and len(ended) == 2
    deltas += ended

    def broken(*_):
        raise RuntimeError("a GPU's error")

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner.model, "run", broken)
        with pytest.raises(RuntimeError, match="a GPU's error"):
            engine.step()
        deltas += engine.fail_step(RuntimeError("it failed"))
    assert not engine.has_work
    ends = {d.request_id: d.completion for d in deltas if d.completion is not None}
    for name, (text, tokens, levels, offsets) in summed(deltas).items():
        assert text == ends[name].text and len(ends[name].token_ids) == 4
        assert len(tokens) == len(levels) == len(offsets) == (0 if name == "2" else 4)  # 2 is not streamed
