"""Every command line that we write for vLLM, parsed by vLLM's own classes in its own environment (`make test-vllm`)."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fixtures_vllm import real_pythons

from sameseed.config import SpecConfig, parse_draft
from sameseed.errors import ConfigError
from sameseed_vllm import draft, flags as vllm
from sameseed_vllm.draft import Spread
from sameseed_vllm.environments import look

PARSE = Path(__file__).with_name("parse_with_vllm.py")
LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "vocab_size": 512,
}
LLAMA |= {"num_key_value_heads": 2, "num_hidden_layers": 4, "max_position_embeddings": 512, "torch_dtype": "bfloat16"}
QWEN = {**LLAMA, "model_type": "qwen3", "num_hidden_layers": 1, "head_dim": 16, "draft_vocab_size": 512}
QWEN |= {"dflash_config": {"mask_token_id": 1, "target_layer_ids": [1, 2]}, "block_size": 4, "target_hidden_size": 64}
GLM = {**LLAMA, "model_type": "glm4_moe", "num_nextn_predict_layers": 1, "architectures": ["Glm4MoeForCausalLM"]}
CONFIGS = {  # config.json files without weights: enough to build a configuration
    "target": {**LLAMA, "architectures": ["LlamaForCausalLM"]},
    "glm": GLM,
    "eagle3-of-qwen": {**QWEN, "architectures": ["Eagle3Qwen3ForCausalLM"]},
    "dflash": {**QWEN, "architectures": ["DFlashDraftModel"]},
    "dspark": {**QWEN, "architectures": ["Qwen3DSparkModel"], "markov_rank": 4, "markov_head_type": "vanilla"},
}
TABLE = [[1, 2, 3], [3, 8, 0]]
ONE = Spread()


@dataclass(frozen=True)
class Case:
    """Settings, and what vLLM must make of them. `whole`: this build accepts all; else only the draft is built."""

    settings: Mapping[str, Any]
    made: Mapping[str, Any] = field(default_factory=dict)
    spec: Mapping[str, Any] | None = None
    spread: Spread = ONE
    model: str = "embedded"
    whole: bool = True


def drafted(draft: str | SpecConfig, spec: Mapping[str, Any], spread: Spread | None = None, **more: Any) -> Case:
    model, whole = more.pop("model", "embedded"), more.pop("whole", True)
    chosen = parse_draft(draft) if isinstance(draft, str) else draft
    settings = {"draft": chosen, "num_draft_tokens": 3, "max_num_seqs": 8, "draft_options": more}
    return Case(settings, {}, {"num_speculative_tokens": 3, **spec}, spread or Spread(), model, whole)


def cases(folder: Path) -> dict[str, Case]:
    limits = {"max_num_seqs": 8, "max_model_len": 256, "max_num_rows": 300, "block_size": 32, "num_blocks": 40}
    both = {"method": "draft_model", "draft_tensor_parallel_size": 2}
    return {
        "plain": Case({}, {"names": ["m", "n"], "seqs": 32, "prefix": True, "tp": 1}),
        "limits": Case({**limits, "prefix_cache": False}, {"seqs": 8, "block": 32, "prefix": False}),
        "bf16": Case({"format": "bf16"}, {}, model=str(folder / "target")),
        **{f"kv {kv}": Case({"kv_format": kv}, {"cache": theirs}) for kv, theirs in vllm.KV_FORMATS.items()},
        "spread": Case({}, {"tp": 2, "pp": 2}, spread=Spread(2, 2)),
        "nodes": Case({}, {"tp": 2, "pp": 2, "executor": "ray"}, spread=Spread(2, nodes=2)),
        "ngram": drafted("ngram", {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4}),
        "ngram by batch": drafted("ngram", {"method": "ngram"}, num_speculative_tokens_per_batch_size=TABLE),
        "ngram on two": drafted("ngram", {"method": "ngram"}, Spread(2, 2)),
        "ngram_gpu": drafted("ngram_gpu", {"method": "ngram_gpu", "prompt_lookup_max": 4}, whole=False),
        "suffix": drafted("suffix", {"method": "suffix", "suffix_decoding_max_cached_requests": 0}),
        "model": drafted("embedded-draft", {"method": "draft_model", "draft_sample_method": "greedy"}),
        "model by batch": drafted(
            "embedded-draft", {"method": "draft_model"}, num_speculative_tokens_per_batch_size=TABLE
        ),
        "sampled": drafted(
            "embedded-draft", {"draft_sample_method": "probabilistic"}, draft_sample_method="probabilistic"
        ),
        "parallel": drafted("embedded-draft", {"parallel_drafting": True}, parallel_drafting=True),
        "model on two": drafted("embedded-draft", both, Spread(2)),
        "head": drafted("embedded-head", {"method": "eagle3"}),
        "head on one of two": drafted(
            "embedded-head",
            {"method": "eagle3", "draft_tensor_parallel_size": 1},
            Spread(2),
            draft_tensor_parallel_size=1,
        ),
        "head over stages": drafted("embedded-head", {"method": "eagle3"}, Spread(1, 2)),
        "head of qwen": drafted(
            str(folder / "eagle3-of-qwen"), {"method": "eagle3"}, model=str(folder / "target"), whole=False
        ),
        "mtp": drafted("mtp", {"method": "mtp"}, model=str(folder / "glm"), whole=False),
        "dflash": drafted(
            str(folder / "dflash"), {"method": "dflash", "parallel_drafting": True}, model=str(folder / "target")
        ),
        "dspark": drafted(str(folder / "dspark"), {"method": "dspark"}, model=str(folder / "target"), whole=False),
    }


@pytest.fixture(scope="module", params=real_pythons() or [None], ids=lambda p: str(p))
def read(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one vLLM reports: its installation, the flags of its parser, and its result for each case."""
    if request.param is None:
        pytest.skip("no vLLM here: `make test-vllm` sets one up, SAMESEED_VLLM_PYTHON names a python that has one")
    folder = tmp_path_factory.mktemp("configs")
    for name, raw in CONFIGS.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(raw))
    asked = cases(folder)
    lines = [[vllm.arguments(c.model, c.settings, c.spread, ("m", "n")), c.whole] for c in asked.values()]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(
        [request.param, str(PARSE)], input=json.dumps(lines), env=env, stdout=subprocess.PIPE, text=True, check=True
    )
    about, *told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(told) == len(asked)
    return {"installed": look(request.param), **about, "cases": asked, "told": dict(zip(asked, told))}


@pytest.mark.slow
@pytest.mark.parametrize("name", cases(Path("/nowhere")))
def test_vllm_reads_what_we_write(name: str, read: dict[str, Any]) -> None:
    case, told, installed = read["cases"][name], read["told"][name], read["installed"]
    words = vllm.arguments(case.model, case.settings, case.spread, ("m",))
    if name == "suffix" and "arctic_inference" not in installed.modules:  # refused by us and by vLLM
        with pytest.raises(ConfigError, match="arctic-inference"):
            vllm.check(installed, words, draft.speculative_config(case.settings, case.spread), case.spread)
        assert "Arctic Inference is required" in told["error"]
        return
    if name == "nodes" and "ray" not in installed.modules:
        assert "ray" in told["error"].lower()
        return
    assert "error" not in told, told
    made = told["made"]
    assert {key: made[key] for key in case.made} == dict(case.made)
    if case.spec is not None:
        wanted = {**case.spec}
        assert {key: made["spec"][key] for key in wanted} == wanted
    table = case.settings.get("draft_options", {}).get("num_speculative_tokens_per_batch_size")
    assert table is None or [list(row) for row in made["spec"]["num_speculative_tokens_per_batch_size"]] == table


@pytest.mark.slow
def test_every_flag_of_its_parser_is_known(read: dict[str, Any]) -> None:
    """We refuse a flag before vLLM starts only if no parser of vLLM has the flag."""
    known = read["installed"].flags
    assert {flag for flag in read["flags"] if flag.startswith("--") and not flag.startswith("--no-")} <= known


@pytest.mark.slow
def test_nodes_are_refused_where_vllm_starts_no_workers_by_ray(read: dict[str, Any]) -> None:
    """The build for CPUs accepts the flags but ends when its model is loaded: it names no resource for Ray."""
    installed, spread = read["installed"], Spread(2, nodes=2)
    if read["ray"]:
        vllm.check(installed, vllm.arguments("embedded", {}, spread, ("m",)), None, spread)
        return
    with pytest.raises(ConfigError, match="starts no Ray workers"):
        vllm.check(installed, vllm.arguments("embedded", {}, spread, ("m",)), None, spread)
