"""Staged faults: each is diagnosed correctly from every engine's metrics; a server without metrics is a clear error."""

import http.server
import json
import re
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
from prometheus_client import generate_latest

from sameseed import LLM, SamplingParams
from sameseed.cli import main
from sameseed.cost.curve import Curve
from sameseed.cost.round import Gap, ModelSteps, RoundCost
from sameseed.errors import ConfigError
from sameseed.measure.costs import Cost, Limits, Profile
from sameseed.plan.doctor import diagnose
from sameseed.plan.metrics import Counted, fetch, read_file, read_text
from sameseed.plan.pricing import rounds_of
from sameseed.server.metrics import ServerMetrics

ROWS, MS, DRAFT_MS = (1, 2, 4, 8, 16, 32, 64), (10, 10.2, 10.6, 12, 20, 40, 80), (1, 1, 1.1, 1.3, 2, 4, 8)


def known(rows=ROWS, ms=MS, draft_ms=DRAFT_MS, start=0.0, gap=0.0):
    target, draft = (Curve([(m, x / 1e3) for m, x in zip(rows, each, strict=True)]) for each in (ms, draft_ms))
    return RoundCost(target, (ModelSteps(draft, start=start),), Gap(gap, gap))


COSTS = known(start=0.2e-3, gap=0.5e-3)
PREFIX = {"sameseed": "sameseed:", "vllm": "vllm:", "llama.cpp": "llamacpp:"}


def page(engine, plain, labelled=None):
    """Metrics text in the form of an engine."""
    lines = [f"{PREFIX[engine]}{name} {value}" for name, value in plain.items()]
    for name, (label, values) in (labelled or {}).items():
        lines += [f'{PREFIX[engine]}{name}{{model_name="m",{label}="{at}"}} {v}' for at, v in values.items()]
    return "\n".join(lines) + "\n"


def drafted(engine, per_pos, drafts=1000, running=1, **more):
    """A page after `drafts` drafts, each with as many tokens as `per_pos` has places."""
    accepted = sum(per_pos)
    plain = {"spec_decode_num_drafts_total": drafts, "spec_decode_num_draft_tokens_total": drafts * len(per_pos)}
    plain["spec_decode_num_accepted_tokens_total"] = accepted
    plain["tokens_predicted_total" if engine == "llama.cpp" else "generation_tokens_total"] = drafts + accepted
    plain["requests_processing" if engine == "llama.cpp" else "num_requests_running"] = running
    places = {str(i): n for i, n in enumerate(per_pos)}
    return page(engine, {**plain, **more}, {"spec_decode_num_accepted_tokens_per_pos_total": ("position", places)})


def ours(per_pos, stages, drafts=1000, passes=1000, **why):
    """A page of our server: seconds of (draft, target, other), and rounds without a draft by reason."""
    text = drafted("sameseed", per_pos, drafts, iteration_tokens_total_count=passes)
    names = dict(zip(("draft", "target", "schedule"), stages, strict=True))
    undrafted = {w.replace("_", " "): n for w, n in {"prompt": 0, **why}.items()}
    rounds = {"spec_decode_undrafted_rounds_total": ("reason", undrafted)}
    return text + page("sameseed", {}, {"engine_time_seconds_total": ("stage", names), **rounds})


def vllm_rounds(per_pos, seconds, rounds=1000):
    """A page of vLLM after rounds that took so many seconds, 1000 of them with a draft."""
    return drafted("vllm", per_pos, inter_token_latency_seconds_sum=seconds, inter_token_latency_seconds_count=rounds)


def found(text, costs=None, plain=None):
    return diagnose(read_text(text), costs, plain)


DOOR = page("sameseed", {"http_requests_total": 5, "engine_up": 1})  # a sameseed server in front of vLLM
GOOD = [800.0, 640, 512, 410]
STAGED = {
    "useless draft": (ours([3, 0, 0, 0], (4, 10, 0.5)), None),
    "weak draft": (ours([250, 80, 30, 10], (4, 10, 0.5)), None),
    "draft context": (ours(GOOD, (1, 10, 0.5), draft_context=900), None),
    "no room": (ours(GOOD, (1, 10, 0.5), no_room=900), None),
    "no draft": (ours(GOOD, (1, 10, 0.5), no_draft=3000), None),
    "draft too large": (ours(GOOD, (24, 10, 0.5)), None),
    "draft share": (ours(GOOD, (9, 10, 0.5)), None),
    "overhead": (ours(GOOD, (1, 10, 9)), None),
    "busy machine": (ours(GOOD, (1, 30, 0.5)), COSTS),
    "batch too large": (ours([600, 300, 100, 50], (1, 6.2, 0.1), passes=1000 / 32), COSTS),
    "k too large": (ours([600, 200, 60, 20, 7, 2, 1, 0], (6, 13, 0.5)), COSTS),
    "k too small": (ours([950, 903], (2, 10.4, 0.5)), COSTS),
    "never pays": (ours([500, 250, 125, 60], (7, 11, 0.1)), known((1, 5), (10, 18), (3, 3))),
}


@pytest.mark.parametrize("name", STAGED)
def test_a_staged_fault_of_our_server_is_named(name):
    text, costs = STAGED[name]
    diagnosis = found(text, costs)
    assert diagnosis.engine == "sameseed"
    assert diagnosis.faults[0].name == name, diagnosis
    assert diagnosis.faults[0].says and diagnosis.verdict


@pytest.mark.parametrize(
    ("text", "plain", "name", "flag"),
    [
        (drafted("vllm", [4, 0, 0]), None, "useless draft", "leave --speculative-config out"),
        (drafted("vllm", [4, 0, 0]) + DOOR, None, "useless draft", "leave --speculative-config out"),
        (drafted("vllm", [600, 590, 580, 575]), None, "draft context", "max_model_len"),
        (drafted("llama.cpp", [5, 1]), None, "useless draft", "--spec-type none"),
        (
            drafted("llama.cpp", [300, 60, 9], tokens_predicted_seconds_total=30), 50, "weak draft",
            "--spec-draft-n-max 1",
        ),
        (vllm_rounds([700, 100, 10, 1], 14), 100.0, "k too large", '"num_speculative_tokens": 1'),
        (vllm_rounds([800, 640], 20), 100.0, "slow rounds", "ngram_gpu"),
        (page("vllm", {"generation_tokens_total": 900}), None, "no drafter", "--speculative-config"),
        (drafted("vllm", [0, 0], drafts=0, generation_tokens_total=900), None, "no draft", "--speculative-config"),
        (page("llama.cpp", {"tokens_predicted_total": 900}), None, "no drafter", "-md"),
        (drafted("llama.cpp", [], drafts=0, tokens_predicted_total=900), None, "no drafter", "-md"),
    ],
)  # fmt: skip
def test_a_staged_fault_of_another_engine_is_named(text, plain, name, flag):
    fault = found(text, None, plain).faults[0]
    assert fault.name == name
    assert any(flag in f for f in fault.flags), fault


def test_what_an_engine_does_not_report_is_left_out():
    counts = {"spec_decode_num_drafts": 100, "spec_decode_num_draft_tokens": 400, "tokens_predicted": 250}
    few = found(page("llama.cpp", {**counts, "spec_decode_num_accepted_tokens": 150}))
    assert few.have == 2.5 and few.batch is None and few.survival == ()


def test_the_verdict_says_what_is_needed_and_what_to_do():
    diagnosis = found(STAGED["k too large"][0], COSTS)
    assert diagnosis.need is not None and diagnosis.have == pytest.approx(1.89)
    assert f"{diagnosis.need:.2f} tokens a drafted round, you have 1.89: use k = " in diagnosis.verdict
    assert "clients on" in diagnosis.verdict
    table = dict(diagnosis.by_batch)
    assert table[1] and list(table.values())[-1] == 0
    large = found(STAGED["batch too large"][0], COSTS)
    assert large.batch == pytest.approx(32) and "turn it off at this load" in large.verdict


def test_break_even_is_the_ratio_of_times():
    # Four draft tokens: a pass over 5 rows (10.95) with a gap (0.5) and four draft steps (4.2), over 10.5.
    diagnosis = found(ours(GOOD, (4.2, 10.95, 0.5)), COSTS)
    assert diagnosis.need == pytest.approx((10.95 + 0.5 + 4.2) / 10.5)
    assert diagnosis.speedup == pytest.approx(3.362 / diagnosis.need)
    # 1000 rounds take 15.65 s. Plain decoding writes 80 tokens/s, so a round takes as long as 1.252 of its tokens.
    assert found(ours(GOOD, (4.2, 10.95, 0.5)), None, 80).need == pytest.approx(80 * 15.65 / 1000)
    bound = found(ours(GOOD, (4.2, 10.95, 0.5)))
    assert (bound.need, bound.need_is) == (pytest.approx(15.65 / 11.45), "bound") and bound.best_k is None
    assert "at least" in bound.verdict and "may pay or not" in bound.verdict and not bound.faults
    lost = found(ours([300, 90, 30, 9], (12, 10, 0.5)))
    assert lost.faults[-1].name == "never pays"  # not even if verifying cost nothing


@pytest.mark.parametrize(
    "text",
    [
        vllm_rounds([900, 850, 800, 750, 700], 62.5, rounds=5000),
        ours([900, 850, 800, 750, 700], (2.5, 59, 1), no_draft=4000),
    ],
)
def test_the_speed_up_counts_rounds_without_a_draft(text):
    """5000 rounds in 62.5 s, 1000 of them with a draft that brought 4 tokens: 9000 tokens, 144 a second."""
    diagnosis = found(text, None, 80)
    assert diagnosis.have == 5 and diagnosis.speedup == pytest.approx(144 / 80)
    assert "pays (1.80 times" in diagnosis.verdict and diagnosis.best_speedup < 3


def test_a_fault_beside_speculation_that_pays_is_what_could_be_better():
    """Lookups that take no time and are seldom right: nothing of heads, and the verdict says first that it pays."""
    well = found(ours(GOOD, (3, 10.9, 0.5)), known(ms=(10, 10.2, 10.6, 16, 30, 60, 99)))
    assert well.faults == () and well.verdict.startswith("Speculation pays")
    diagnosis = found(ours([310, 220, 160, 120], (0.01, 10.4, 0.5)), COSTS)
    assert diagnosis.verdict.startswith("Speculation pays (1.") and "Only 31%" in diagnosis.verdict
    assert diagnosis.faults[0].name == "weak draft" and "repeat little" in diagnosis.faults[0].says
    assert not any("--draft-format" in flag for flag in diagnosis.faults[0].flags)


def test_costs_of_the_server_itself_are_used():
    costs = {str(m): s / 1e3 for m, s in zip(ROWS, MS, strict=True)}
    passes = page("sameseed", {}, {"pass_cost_seconds": ("rows", costs)})
    diagnosis = found(STAGED["k too large"][0] + passes)
    assert (diagnosis.need_is, diagnosis.faults[0].name) == ("costs", "k too large")
    need = (12 + 8 / 8 + 0.5 + 6) / 10.5
    assert diagnosis.need == pytest.approx(need), "9 rows lie an eighth of the way from 8 to 16"
    measured = LLM("embedded", "embedded-draft", policy="goodput")
    measured.generate("One day", SamplingParams(max_tokens=24))
    assert "1" in measured.engine.pass_costs and not LLM("embedded", policy="fixed").engine.pass_costs


def test_remarks_stand_behind_faults_and_uneven_gaps_are_a_busy_machine():
    assert [f.name for f in found(ours(GOOD, (9, 10, 0.5), cost=500)).faults] == ["draft share", "cost"]
    buckets = {"0.01": 900.0, "0.02": 940.0, "0.1": 990.0, "1.0": 1000.0, "+Inf": 1000.0}
    tables = {"inter_token_latency_seconds_bucket": ("le", buckets)}
    assert found(drafted("vllm", GOOD) + page("vllm", {}, tables)).faults[0].name == "busy machine"


def of_engine(model, draft=None, tokens=48, **settings):
    """doctor's diagnosis of a real engine that wrote some texts, from the server's own metrics page."""
    llm = LLM(str(model), None if draft is None else str(draft), **{"policy": "fixed", **settings})
    llm.generate(["The fox", "One day", "A man"], SamplingParams(max_tokens=tokens, ignore_eos=True))
    spec = llm.engine.metrics
    stats = {"drafts": spec.num_drafts, "draft_tokens": spec.num_draft_tokens, "undrafted": dict(spec.undrafted)}
    stats |= {"accepted_tokens": spec.num_accepted_tokens, "times": vars(llm.engine.times)}
    stats |= {"accepted_per_pos": {str(i): n for i, n in enumerate(spec.num_accepted_tokens_per_pos)}}
    stats |= {"pass_costs": llm.engine.pass_costs}
    stats |= {"passes": {"counts": [spec.num_rounds, *[0] * 13], "tokens": spec.num_rounds}}
    client = SimpleNamespace(stats=stats, past_stats=[], state="ready", num_restarts=0)
    metrics = ServerMetrics(client, SimpleNamespace(num_refused=0), "m")
    return found(generate_latest(metrics.registry).decode())


def test_faults_staged_in_real_engines_are_named():
    plain = of_engine("embedded")
    assert (plain.engine, plain.faults[0].name) == ("sameseed", "no drafter")
    assert of_engine("embedded", "ngram", draft_options={"min_ngram": 9, "max_ngram": 9}).faults[0].name == "no draft"
    assert of_engine("embedded", "embedded-draft", num_draft_tokens=0).faults[0].name == "off"
    well = of_engine("embedded", "embedded-draft", num_draft_tokens=3, policy="fixed")
    assert well.have is not None and well.have > 1.5 and well.need_is == "bound"


class _Page(http.server.BaseHTTPRequestHandler):
    text, status, seen = "", 200, 0

    def do_GET(self):
        _Page.seen += 1
        self.send_response(_Page.status)
        self.end_headers()
        self.wfile.write(_Page.text.replace("COUNT", str(1000 * _Page.seen)).encode())

    def log_message(self, *_):
        return None


@pytest.fixture
def server():
    served = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Page)
    threading.Thread(target=served.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    _Page.seen, _Page.status = 0, 200
    yield f"http://127.0.0.1:{served.server_port}"
    served.shutdown()
    served.server_close()


def test_two_looks_at_a_server(server, capsys):
    growing = r"(generation_tokens|num_drafts|num_draft_tokens)_total \d+"
    _Page.text = re.sub(growing, r"\1_total COUNT", drafted("vllm", [1, 0], generation_tokens_total=0))
    assert main(["doctor", server, "--seconds", "0.05", "--json"]) == 0
    diagnosis = json.loads(capsys.readouterr().out)
    assert diagnosis["faults"][0]["name"] == "useless draft" and diagnosis["tokens"] == 10000
    assert main(["doctor", server + "/v1", "--seconds", "0.05"]) == 0
    assert "take a draft of this very target" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "status", "message"),
    [
        (drafted("vllm", GOOD), 200, "no token was written"), ("nothing", 404, "turn metrics on"),
        ("nothing", 401, "--api-key-file"), ("python_info 1\n", 200, "no counters of an engine"),
        ("<html>what?</html>", 200, "no Prometheus text"),
    ],
)  # fmt: skip
def test_servers_that_say_nothing(server, text, status, message, capsys):
    _Page.text, _Page.status = text, status
    assert main(["doctor", server, "--seconds", "0.05"]) == 2
    assert message in capsys.readouterr().err


def test_a_key_that_is_not_there(server, tmp_path, capsys):
    key = ["--api-key-file", str(tmp_path / "none.txt")]
    for command in (["doctor", server], ["tune", "m", "--engine", "vllm", "--url", server, "--drafts", "ngram"]):
        assert main([*command, *key]) == 2
        assert "give a text file" in capsys.readouterr().err
    (tmp_path / "none.txt").write_text("\n")
    assert main(["doctor", server, *key]) == 2
    assert "holds no API key" in capsys.readouterr().err


def test_files(tmp_path, capsys):
    path = tmp_path / "saved"
    path.write_text(STAGED["draft share"][0])
    assert main(["doctor", str(path)]) == 0
    assert "Drafting takes 46% of the time" in capsys.readouterr().out
    for text, message in (("{}", "no Prometheus text"), (drafted("vllm", [], drafts=0), "after some load")):
        path.write_text(text)
        with pytest.raises(ConfigError, match=message):
            read_file(path)
    with pytest.raises(ConfigError, match=r"cannot read.*begins with http://"):
        read_file(tmp_path / "none")
    with pytest.raises(ConfigError, match="is the server running"):
        fetch("http://127.0.0.1:9", timeout=0.5)
    without = "import sys; sys.modules |= dict.fromkeys(('httpx', 'pydantic', 'msgspec')); import sameseed.cli.doctor"
    subprocess.run([sys.executable, "-c", without], check=True)  # as `pip install sameseed` installs it


def test_costs_come_from_a_file(tmp_path, capsys):
    (tmp_path / "page").write_text(STAGED["k too large"][0])
    rows = zip(ROWS, MS, strict=True)
    costs = tuple(Cost("bf16", "bf16", 64, m, ms, 1.0, ms, ms, 5, 1.0, 1.0) for m, ms in rows)
    profile = Profile({}, costs, (), (), (), Limits(1, {"read": (1.0,), "fp32": (1.0,)}, {}, "native"))
    (tmp_path / "good.json").write_text(json.dumps(profile.as_dict()))
    argv = ["doctor", str(tmp_path / "page"), "--json", "--cost"]
    assert main([*argv, str(tmp_path / "good.json")]) == 0
    assert json.loads(capsys.readouterr().out)["need_is"] == "costs"
    (tmp_path / "p.json").write_text("{}")
    assert main([*argv, str(tmp_path / "p.json")]) == 2
    assert "profile again" in capsys.readouterr().err


def test_a_counter_that_began_anew_counts_from_nothing():
    now, before = Counted("vllm", drafts=5.0, stages={"draft": 1.0}), Counted("vllm", drafts=9.0, stages={"draft": 3.0})
    assert now.since(before, 1.0).drafts == 5.0 and now.since(before, 1.0).stages == {"draft": 1.0}
    assert rounds_of(now) is None
