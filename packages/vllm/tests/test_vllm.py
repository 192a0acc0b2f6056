"""sameseed's settings as vLLM's command line: golden outputs, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from sameseed import registry
from sameseed.config import SpecConfig, parse_draft
from sameseed.errors import ConfigError, ModelLoadError
from sameseed_vllm import draft as drafts, environments, flags as vllm
from sameseed_vllm.draft import Spread
from sameseed_vllm.environments import BIND, cores_of_workers, environment
from sameseed_vllm.flags import Installed

NGRAM = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4}
SUFFIX = {
    "method": "suffix",
    "suffix_decoding_max_tree_depth": 24,
    "suffix_decoding_max_spec_factor": 2.0,
    "suffix_decoding_min_token_prob": 0.1,
}
HEAD = ["org/model", "--served-model-name", "m", "--max-num-seqs", "32"]


def arguments(model: str = "org/model", spread: Spread | None = None, more: str = "", **settings: Any) -> list[str]:
    return vllm.arguments(model, settings, spread or Spread(), ("m",), more=more)


def drafted(draft: SpecConfig, spread: Spread | None = None, **settings: Any) -> dict[str, Any]:
    made = drafts.speculative_config({"draft": draft, **settings}, spread or Spread())
    assert made is not None
    return made


def test_defaults() -> None:
    assert arguments() == HEAD
    assert arguments(draft=SpecConfig("none")) == HEAD
    assert arguments(draft=parse_draft("ngram"), num_draft_tokens=0) == HEAD
    assert arguments(device="cuda", max_pass_ms=100.0, template_date=None) == HEAD
    assert vllm.arguments("org/model", {}, Spread(), ("m",), reasoning_parser="none") == HEAD


def test_limits() -> None:
    made = arguments(
        max_num_seqs=8, max_model_len=4096, max_num_rows=1024, block_size=32, num_blocks=500, prefix_cache=False
    )
    assert made[3:] == [
        *("--max-num-seqs", "8"),
        *("--max-model-len", "4096"),
        *("--max-num-batched-tokens", "1024"),
        *("--block-size", "32"),
        *("--num-gpu-blocks-override", "500"),
        "--no-enable-prefix-caching",
    ]
    assert environment({"threads": 4}) == {"OMP_NUM_THREADS": "4", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    assert environment({}) == {}


def test_gpus_and_nodes() -> None:
    ray = ["--distributed-executor-backend", "ray"]
    assert arguments(spread=Spread(4))[5:] == ["--tensor-parallel-size", "4"]
    two = ["--tensor-parallel-size", "8", "--pipeline-parallel-size", "2"]
    assert arguments(spread=Spread(8, nodes=2))[5:] == [*two, *ray]
    assert arguments(spread=Spread(16, 1, nodes=2))[5:] == ["--tensor-parallel-size", "16", *ray]
    assert arguments(spread=Spread(1, 2))[5:] == ["--pipeline-parallel-size", "2"]
    with pytest.raises(ConfigError, match="--nodes"):
        Spread(nodes=0)


ORG = "org/Some-EAGLE3-head"
TABLE = {"num_speculative_tokens_per_batch_size": [[1, 4, 4], [5, 32, 0]]}
SAMPLED = {"draft_sample_method": "probabilistic"}


@pytest.mark.parametrize(
    ("draft", "options", "made"),
    [
        ("ngram", {}, NGRAM),
        ("ngram", {"max_ngram": 7}, {**NGRAM, "prompt_lookup_max": 7}),
        ("ngram", TABLE, {**NGRAM, **TABLE}),
        ("ngram_gpu", {"max_ngram": 5}, {"method": "ngram_gpu", "prompt_lookup_min": 2, "prompt_lookup_max": 5}),
        ("suffix", {}, {**SUFFIX, "suffix_decoding_max_cached_requests": 0}),  # vLLM's store is of all tenants
        ("suffix", {"past": "all"}, SUFFIX),
        ("org/small", {}, {"method": "draft_model", "model": "org/small"}),
        ("parallel:org/small", {}, {"method": "draft_model", "model": "org/small", "parallel_drafting": True}),
        (
            "org/pard",
            {"parallel_drafting": True},
            {"method": "draft_model", "model": "org/pard", "parallel_drafting": True},
        ),
        (f"eagle:{ORG}", {}, {"method": "eagle3", "model": ORG}),
        ("eagle:org/EAGLE-head", {}, {"method": "eagle", "model": "org/EAGLE-head"}),
        ("mtp", {}, {"method": "mtp"}),
        ("mtp:org/m", {}, {"method": "mtp", "model": "org/m"}),
        ("assistant:org/m", {}, {"method": "mtp", "model": "org/m"}),
        ("dspark", SAMPLED, {"method": "dspark", **SAMPLED}),
        ("dflash:org/d", {}, {"method": "dflash", "model": "org/d"}),
        ("org/qwen-DFlash-b16", {}, {"method": "dflash", "model": "org/qwen-DFlash-b16"}),
    ],
)
def test_drafts(draft: str, options: dict[str, Any], made: dict[str, Any]) -> None:
    assert drafted(parse_draft(draft), draft_options=options) == {"num_speculative_tokens": 4, **made}


def test_packaged_drafts_and_spreads() -> None:
    assert drafted(parse_draft("ngram"), num_draft_tokens=6)["num_speculative_tokens"] == 6
    for draft in ("org/small", f"eagle:{ORG}"):
        assert drafted(parse_draft(draft), Spread(4))["draft_tensor_parallel_size"] == 4
    # A checkpoint's content decides, not its name.
    assert drafted(SpecConfig("draft_model", "embedded-head"))["method"] == "eagle3"
    pair = drafted(SpecConfig("draft_model", "embedded-draft"))
    assert pair["method"] == "draft_model" and (Path(pair["model"]) / "config.json").is_file()
    line = arguments(draft=parse_draft("ngram"))
    assert json.loads(line[line.index("--speculative-config") + 1])["method"] == "ngram"
    assert line[line.index("--per-request-spec-decode-metrics") + 1] == "summary"


@pytest.mark.parametrize("name", sorted(drafts.OPTIONS))
def test_options_are_the_drafters_own(name: str) -> None:
    """`OPTIONS` repeats the drafters' defaults, so the two must agree."""
    own = vars(registry.load("drafters", name).DRAFTER.Options())
    assert drafts.OPTIONS[name].items() <= own.items()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"draft": parse_draft("ngram > org/m")}, "no drafter like 'cascade'"),
        ({"draft": parse_draft("self_quant")}, "no drafter like 'self_quant'"),
        ({"draft": parse_draft("ngram"), "policy": "goodput"}, "--policy fixed"),
        ({"draft": parse_draft("ngram"), "confidence": 0.5}, "leave them out"),
        ({"draft": parse_draft("org/m"), "overlap": 1}, "leave them out"),
        ({"draft": parse_draft("org/m"), "draft_format": "w4a8"}, "--draft-format at auto"),
        ({"draft": parse_draft("draft_model")}, "needs the draft's checkpoint"),
        (
            {"draft": parse_draft("ngram"), "draft_options": {"store": "x"}},
            "min_ngram, max_ngram; its own .* got store",
        ),
        ({"draft": parse_draft("suffix"), "draft_options": {"past": "tenant"}}, "one store of past texts for all"),
        ({"draft": parse_draft("dflash")}, "needs the draft.s checkpoint"),
        ({"draft": parse_draft("ngram_gpu:org/m")}, "has no model"),
        ({"draft": parse_draft("assistant")}, "needs the draft.s checkpoint"),
        ({"backend": "cpu"}, "leave it at auto"),
        ({"device": "cuda:1"}, "CUDA_VISIBLE_DEVICES"),
        ({"max_pass_ms": 50.0}, "--max-num-rows"),
        ({"template_date": "2026-11-29"}, "leave it out"),
        ({"kv_format": "nf4"}, "no KV cache in 'nf4'"),
        ({"format": "w4a8"}, r"sameseed quantize MODEL --scheme w4a8 --out DIR"),
    ],
)
def test_what_vllm_cannot_do_is_refused_with_a_remedy(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        arguments(**settings)


def checkpoint(folder: Path, quantization: dict[str, Any] | None) -> str:
    folder.mkdir()
    raw = {"model_type": "llama"} | ({"quantization_config": quantization} if quantization else {})
    (folder / "config.json").write_text(json.dumps(raw))
    return str(folder)


W4 = {"num_bits": 4, "type": "int", "group_size": 128}
W8 = {"num_bits": 8, "type": "int"}
FP8 = {"num_bits": 8, "type": "float"}
STORED = [
    ({"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": W4}, "h": {}}}, "w4a16-g128"),
    ({"config_groups": {"g": {"weights": W8, "input_activations": {"num_bits": 8}}}}, "w8a8"),
    ({"config_groups": {"g": {"weights": {**W4, "symmetric": False}}}}, "w4a16-g128-asym"),
    ({"config_groups": {"g": {"weights": W4}, "h": {"weights": {**W4, "group_size": 64}}}}, "w4a16"),
    ({"config_groups": {"g": {"weights": FP8}}}, "fp8"),
    ({"config_groups": {"g": {"weights": {**FP8, "strategy": "block"}, "input_activations": FP8}}}, "fp8-a8-b128"),
    ({"format": "mxfp4-pack-quantized", "config_groups": {"g": {"weights": {**FP8, "num_bits": 4}}}}, "mxfp4"),
    ({"quant_method": "bitsandbytes", "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}, "nf4-dq"),
    ({"quant_method": "gptq", "bits": 4, "group_size": 32}, "w4a16-g32"),
    ({"quant_method": "gptq", "bits": 4, "group_size": -1}, "w4a16"),
    ({"quant_method": "awq", "bits": 4, "group_size": None}, "w4a16"),
]


@pytest.mark.parametrize(("config", "scheme"), STORED)
def test_a_format_that_the_checkpoint_has_is_no_change(config: dict[str, Any], scheme: str, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "q", config)
    for asked in (scheme, re.sub("-[gb][0-9]+", "", scheme), scheme.partition("-")[0]):
        assert arguments(folder, format=asked) == arguments(folder) == [folder, *HEAD[1:]]
    with pytest.raises(ConfigError, match=f"stores them \\({scheme}\\), not as --format w2a2"):
        arguments(folder, format="w2a2")
    with pytest.raises(ConfigError, match="not as --format bf16"):
        arguments(folder, format="bf16")


def test_dense_formats_and_caches(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "dense", None)
    assert arguments(folder, format="bf16")[3:5] == ["--dtype", "bfloat16"]
    assert arguments(kv_format="fp8")[3:5] == ["--kv-cache-dtype", "fp8_e4m3"]


def test_models(tmp_path: Path) -> None:
    assert (Path(drafts.model_path("embedded")) / "config.json").is_file()
    (tmp_path / "m.gguf").write_bytes(b"")
    for name in (str(tmp_path / "m.gguf"), str(tmp_path / "nothing"), "nothing", "a/b/c"):
        with pytest.raises(ModelLoadError):
            drafts.model_path(name)


NODES = "--nnodes 2 --node-rank 0 --master-addr 10.0.0.1"  # several nodes without Ray


def test_own_flags() -> None:
    assert arguments(more="--enforce-eager --gpu-memory-utilization 0.8")[-3:] == [
        "--enforce-eager",
        "--gpu-memory-utilization",
        "0.8",
    ]
    for more in ("-tp 2 -pp 2 -ep", "-O3", "--config-format hf", "--max-num-partial-prefills 2", NODES):
        assert arguments(more=more)[len(HEAD) :] == more.split()


@pytest.mark.parametrize(
    "more",
    [
        *("--host 0.0.0.0", "--port=1", "--trust-remote-code", "--trust_remote_code", "--api-key x", "--trust"),
        *("--ho 0.0.0.0", "--po 1", "--ap x", "--ud /tmp/x", "--uds=/tmp/x", "--mo x", "--api_key x", "--root_path x"),
        *("--config f.yaml", "--config=f.yaml", "--max-num-seqs 3", "--max_num_seqs=3", "--max-num-s 3"),
        *("--speculative-config.model=x", "-sc x", "-sc.model x", "--enforce-eager --max-num-seqs 3"),
    ],
)
def test_flags_that_are_sameseeds(more: str) -> None:
    with pytest.raises(ConfigError, match="sameseed's own flags"):
        arguments(more=more)


@pytest.mark.parametrize(
    ("draft", "options", "says"),
    [
        ("ngram", {"draft_sample_method": "greedy"}, "is for draft_model, eagle"),
        ("org/m", {"draft_sample_method": "beam"}, "'greedy' or 'probabilistic'"),
        ("org/m", {"draft_tensor_parallel_size": 2}, "1 or the target's"),
        ("org/m", {"parallel_drafting": 1}, "true or false"),
        ("org/m", {"rejection_sample_method": "fly"}, "its own are .* got rejection_sample_method"),
        ("suffix", {"suffix_decoding_max_cached_requests": -1}, "0 or more"),
        *(
            ("ngram", {"num_speculative_tokens_per_batch_size": table}, r"a list of \[first, last, tokens\]")
            for table in ([], 3, [[2, 3, 1]], [[1, 2, 9]], [[1, 4, 1], [4, 5, 1]], [[1, 2]], [[1, 2, 1.5]])
        ),
    ],
)
def test_vllms_own_keys_are_checked(draft: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        drafted(parse_draft(draft), draft_options=options)


@pytest.mark.parametrize(
    ("architecture", "speculator", "method"),
    [
        ("Eagle3Qwen3ForCausalLM", None, "eagle3"), ("LlamaForCausalLMEagle3", None, "eagle3"),
        ("PEagleDraftModel", None, "eagle3"), ("EagleLlamaForCausalLM", None, "eagle"),
        ("EagleDeepSeekMTPModel", None, "eagle"), ("DFlashDraftModel", None, "dflash"),
        ("Qwen3DSparkModel", None, "dspark"), ("MiMoMTPModel", None, "mtp"), ("Anything", "peagle", "eagle3"),
        ("Anything", "dflash2", "dflash"), ("LlamaForCausalLM", None, "draft_model"),
    ],
)  # fmt: skip
def test_folders_are_told_apart(architecture: str, speculator: str | None, method: str, tmp_path: Path) -> None:
    raw = {"architectures": [architecture]} | ({"speculators_model_type": speculator} if speculator else {})
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert drafted(SpecConfig("draft_model", str(tmp_path)))["method"] == method


def test_a_folder_that_names_a_mask_token_drafts_in_parallel(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "pard_token": 9}))
    made = drafted(SpecConfig("draft_model", str(tmp_path)))
    assert made["method"] == "draft_model" and made["parallel_drafting"] is True
    off = drafted(SpecConfig("draft_model", str(tmp_path)), draft_options={"parallel_drafting": False})
    assert off["parallel_drafting"] is False


def test_workers_get_cores_of_their_own() -> None:
    one = [(0, cpu, cpu) for cpu in range(5)]
    assert cores_of_workers(1, {0, 1}, one) is None and cores_of_workers(2, {0, 1}, []) is None
    assert cores_of_workers(2, {0, 1}, one) == "0|1"
    assert cores_of_workers(2, set(range(5)), one) == "0,1|2,3,4"
    assert cores_of_workers(3, {2}, one) == "2|2|2"
    two = [(0, 0, 0), (0, 1, 1), (1, 2, 2), (1, 3, 3)]
    assert cores_of_workers(2, {0, 1, 2, 3}, two) is None  # vLLM gives each worker a node
    assert cores_of_workers(2, {0, 1}, two) == "0|1"
    hyper = [(0, 0, 0), (0, 0, 2), (0, 1, 1), (0, 1, 3)]
    assert cores_of_workers(2, {0, 1, 2, 3}, hyper) == "2|3" and cores_of_workers(4, {0, 1, 2, 3}, hyper) == "0|2|1|3"
    assert all(len(cpu) == 3 for cpu in environments.topology())


def test_the_environment_binds_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(BIND, raising=False)
    monkeypatch.setattr(environments, "cores_of_workers", lambda workers: "|".join("0" * workers))
    assert environment({}, Spread(2, 2)) == {BIND: "0|0|0|0"}
    assert environment({"threads": 2}, Spread(2))[BIND] == "nobind"
    assert environment({}, Spread(2, nodes=2), True) == {"VLLM_BATCH_INVARIANT": "1"}
    monkeypatch.setenv(BIND, "0-1|2-3")
    assert environment({}, Spread(2)) == {}  # the user has set it already


GPU, CPU = Installed("0.33.0", modules=frozenset({"ray"})), Installed("0.32.0", cpu=True)


def verdict(
    installed: Installed, spread: Spread | None = None, more: str = "", invariant: bool = False, **settings: Any
) -> None:
    spread = spread or Spread()
    words = arguments(spread=spread, more=more, **settings)
    vllm.check(installed, words, drafts.speculative_config(settings, spread), spread, invariant)


def test_what_a_vllm_has_passes() -> None:
    verdict(GPU, Spread(2, 2), invariant=True, draft=SpecConfig("eagle", "org/eagle3"), kv_format="int4")
    verdict(GPU, Spread(2, nodes=2), draft=parse_draft("ngram_gpu"))
    verdict(CPU, Spread(2), draft=parse_draft("org/m"), kv_format="fp8")
    verdict(Installed("0.1.dev1+g12ab34c.cpu"), Spread(1, 2), draft=SpecConfig("eagle", "org/eagle3"))
    verdict(Installed("0.30.1rc1"), Spread(1, 2), draft=SpecConfig("eagle", "org/eagle3"))
    known = Installed(
        "0.33.0", flags=frozenset(a for a in [*arguments(), "--enforce-eager", "--additional-config"] if a[0] == "-")
    )
    for more in (
        "--enforce-eager",
        "--enforce-e",
        "--enforce_eager",
        "--no-enforce-eager",
        "--additional-config.a.b=3",
        "-O3",
    ):
        verdict(known, more=more)


@pytest.mark.parametrize(
    ("installed", "settings", "says"),
    [
        (Installed("0.28.2"), {}, "0.28.2 is too old, 0.29 is the oldest"),
        (Installed("unknown"), {}, "too old"),
        (
            Installed("0.29.0"),
            {"spread": Spread(1, 2), "draft": parse_draft("org/m")},
            "several groups .* update it to 0.30",
        ),
        (
            Installed("0.30.0"),
            {"spread": Spread(2), "draft": parse_draft("org/m"), "draft_options": {"draft_tensor_parallel_size": 1}},
            "update it to 0.31",
        ),
        (GPU, {"draft": parse_draft("suffix")}, "pip install arctic-inference"),
        (Installed("0.33.0"), {"spread": Spread(nodes=2)}, "pip install ray"),
        (CPU, {"spread": Spread(nodes=2)}, "one server a node with a router"),
        (CPU, {"invariant": True}, "GPU kernels"),
        (CPU, {"kv_format": "int8"}, "no int8_per_token_head cache on CPUs"),
        (CPU, {"draft": parse_draft("ngram_gpu")}, "--draft ngram_gpu is not to be had"),
        (CPU, {"spread": Spread(1, 2), "draft": parse_draft("org/m")}, "several groups of layers is not to be had"),
        (
            Installed("0.33.0", flags=frozenset({"--served-model-name", "--max-num-seqs"})),
            {"more": "--max-num-sqs-x 3"},
            "0.33.0 does not know the flag --max-num-sqs-x; did you mean --max-num-seqs",
        ),
    ],
)
def test_what_a_vllm_lacks_is_refused(installed: Installed, settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        verdict(installed, **settings)


def test_notes() -> None:
    ngram, suffix = ({"method": name, "suffix_decoding_max_cached_requests": 0} for name in ("ngram", "suffix"))
    assert vllm.notes(GPU, None) == vllm.notes(GPU, ngram) == []
    assert "not schedule ahead with --draft suffix" in vllm.notes(GPU, suffix)[0]
    assert "ngram_gpu does not" in vllm.notes(Installed("0.31.0"), ngram)[0]
    assert "one store" in vllm.notes(GPU, {"method": "suffix"})[1]
    assert "does not say its age" in vllm.notes(Installed("0.1.dev1+g12ab34c"), None)[0]
    assert "slower" in vllm.notes(GPU, None, True)[0]
    assert "temperature is not 0 are refused" in vllm.notes(CPU, {"method": "draft_model"})[0]
    assert vllm.greedy_only(CPU, ngram) and not vllm.greedy_only(CPU, None) and not vllm.greedy_only(GPU, ngram)
    assert vllm.shares_past({"method": "suffix"}) and not vllm.shares_past(suffix) and not vllm.shares_past(None)
