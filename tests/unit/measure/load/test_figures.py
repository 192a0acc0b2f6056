from __future__ import annotations

import numpy as np
import pytest

from sameseed.measure.load import outcome as figures
from sameseed.measure.load.outcome import Bounds, RequestOutcome


@pytest.mark.parametrize("count", [1, 2, 7, 100])
def test_percentiles_are_numpys(count: int) -> None:
    values = np.random.default_rng(count).random(count).tolist()
    expected = {"mean": np.mean(values), **{f"p{p}": np.percentile(values, p) for p in (50, 90, 99)}}
    assert figures.spread_ms(values) == pytest.approx({name: float(v) * 1e3 for name, v in expected.items()})
    assert set(figures.spread_ms([]).values()) == {None}


def test_summary_counts_only_what_was_completed() -> None:
    good = RequestOutcome(10.0, [10.1, 10.3, 10.5], [1, 2, 2], 5, 20, "usage", "abc", [1, 2, 3, 4, 5])
    slow = RequestOutcome(10.0, [11.0, 12.0], [1, 1], 2, 30, "usage", "ab", [1, 2])
    lost = RequestOutcome(9.0, [9.5], [1], 1, error="cut off", detail="why", retries=1)
    made = figures.summarize([good, slow, lost], Bounds(ttft=0.5, tpot=0.2))
    assert made["seconds"] == pytest.approx(3.0)  # from the first request sent, completed or not
    assert (made["num_requests"], made["num_completed"], made["num_good"]) == (3, 2, 1)
    assert made["output_tokens_per_s"] == pytest.approx(7 / 3)
    assert made["goodput_requests_per_s"] == pytest.approx(1 / 3)
    assert made["ttft_ms"]["mean"] == pytest.approx(550) and made["num_prompt_tokens"] == 50
    assert made["tpot_ms"]["p50"] == pytest.approx((100 + 1000) / 2)
    assert made["itl_chunk_ms"]["mean"] == pytest.approx((200 + 200 + 1000) / 3)
    assert made["itl_token_ms"]["mean"] == pytest.approx((4 * 100 + 1000) / 5)
    assert (made["errors"], made["error_details"], made["retries"]) == ({"cut off": 1}, ["why"], 1)


@pytest.mark.parametrize(
    ("bounds", "good"),
    [(Bounds(), True), (Bounds(ttft=0.9), False), (Bounds(tpot=0.49), False), (Bounds(1.0, 0.5), True)],
)
def test_bounds(bounds: Bounds, good: bool) -> None:
    assert bounds.holds(RequestOutcome(0.0, [1.0, 2.0], num_output=3)) is good


def test_nothing_came_back() -> None:
    made = figures.summarize([RequestOutcome(1.0, error="timeout")], Bounds())
    assert made["output_tokens_per_s"] == 0 and made["ttft_ms"]["p50"] is None


def test_texts_are_compared_where_both_have_one() -> None:
    a, b = RequestOutcome(0.0, text="x", token_ids=[1]), RequestOutcome(0.0, text="x", token_ids=[2])
    untold, failed = RequestOutcome(0.0, text="x"), RequestOutcome(0.0, text="y", error="timeout")
    assert figures.same_texts([a, a, a, a], [a, b, untold, failed]) == (2, 3)
    assert figures.same_texts([a, a, a], [a]) == (1, 1), "as far as both were sent"


PAGE = """# HELP vllm:spec_decode_num_drafts_total text
vllm:spec_decode_num_drafts_total{model_name="m",engine="0"} 10.0
vllm:spec_decode_num_drafts_total{model_name="m",engine="1"} 5.0
vllm:spec_decode_num_draft_tokens_total{model_name="m"} 60.0
llamacpp:spec_decode_num_accepted_tokens_total 20
vllm:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 12.0
vllm:spec_decode_num_drafts_created{model_name="m"} 1.7e9
"""


def test_counters_of_a_metrics_page() -> None:
    after = figures.counters(PAGE)
    assert after == {
        "spec_decode_num_drafts": 15,
        "spec_decode_num_draft_tokens": 60,
        "spec_decode_num_accepted_tokens": 20,
    }
