"""sameseed's settings as vLLM's command line: golden, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sameseed import registry
from sameseed.config import SpecConfig, parse_draft
from sameseed.errors import ConfigError, ModelLoadError
from sameseed.export import vllm
from sameseed.export.vllm import Spread

HEAD = ["org/model", "--served-model-name", "m", "--max-num-seqs", "32"]


def arguments(model: str = "org/model", spread: Spread | None = None, more: str = "", **settings: Any) -> list[str]:
    return vllm.arguments(model, settings, spread or Spread(), "m", more=more)


def drafted(draft: SpecConfig, spread: Spread | None = None, **settings: Any) -> dict[str, Any]:
    made = vllm.speculative_config({"draft": draft, **settings}, spread or Spread())
    assert made is not None
    return made


def test_defaults() -> None:
    assert arguments() == HEAD
    assert arguments(draft=SpecConfig("none")) == HEAD
    assert arguments(draft=parse_draft("ngram"), num_draft_tokens=0) == HEAD


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
    assert vllm.environment({"threads": 4}) == {"OMP_NUM_THREADS": "4", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    assert vllm.environment({}) == {}


def test_gpus_and_nodes() -> None:
    ray = ["--distributed-executor-backend", "ray"]
    assert arguments(spread=Spread(4))[5:] == ["--tensor-parallel-size", "4"]
    two = ["--tensor-parallel-size", "8", "--pipeline-parallel-size", "2"]
    assert arguments(spread=Spread(8, nodes=2))[5:] == [*two, *ray]
    assert arguments(spread=Spread(16, 1, nodes=2))[5:] == ["--tensor-parallel-size", "16", *ray]
    assert arguments(spread=Spread(1, 2))[5:] == ["--pipeline-parallel-size", "2"]
    with pytest.raises(ConfigError, match="--nodes"):
        Spread(nodes=0)


def test_drafts() -> None:
    assert drafted(parse_draft("ngram"), num_draft_tokens=6) == {
        "method": "ngram",
        "num_speculative_tokens": 6,
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 4,
    }
    assert drafted(parse_draft("ngram"), draft_options={"max_ngram": 7})["prompt_lookup_max"] == 7
    assert drafted(parse_draft("suffix"), draft_options={"past": "none"}) == {
        "method": "suffix",
        "num_speculative_tokens": 4,
        "suffix_decoding_max_tree_depth": 24,
        "suffix_decoding_max_spec_factor": 2.0,
        "suffix_decoding_min_token_prob": 0.1,
        "suffix_decoding_max_cached_requests": 0,
    }
    assert drafted(parse_draft("org/small")) == {
        "method": "draft_model",
        "num_speculative_tokens": 4,
        "model": "org/small",
    }
    assert drafted(parse_draft("org/small"), Spread(4))["draft_tensor_parallel_size"] == 4
    head = SpecConfig("eagle", "org/Some-EAGLE3-head")
    assert drafted(head, Spread(4)) == {
        "method": "eagle3",
        "num_speculative_tokens": 4,
        "model": "org/Some-EAGLE3-head",
        "draft_tensor_parallel_size": 4,
    }
    assert drafted(SpecConfig("eagle", "org/EAGLE-head"))["method"] == "eagle"
    # A folder is looked into, whatever it is called.
    assert drafted(SpecConfig("draft_model", "embedded-head"))["method"] == "eagle3"
    pair = drafted(SpecConfig("draft_model", "embedded-draft"))
    assert pair["method"] == "draft_model" and (Path(pair["model"]) / "config.json").is_file()
    line = arguments(draft=parse_draft("ngram"))
    assert json.loads(line[line.index("--speculative-config") + 1])["method"] == "ngram"
    assert line[line.index("--per-request-spec-decode-metrics") + 1] == "summary"


@pytest.mark.parametrize("name", sorted(vllm.OPTIONS))
def test_options_are_the_drafters_own(name: str) -> None:
    """They stand here a second time: they must not part."""
    own = vars(registry.load("drafters", name).DRAFTER.Options())
    assert vllm.OPTIONS[name].items() <= own.items()


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
        ({"draft": parse_draft("ngram"), "draft_options": {"store": "x"}}, "min_ngram, max_ngram; got store"),
        ({"draft": parse_draft("org/m"), "spread": Spread(nodes=2)}, "--tensor-parallel-size alone"),
        ({"backend": "cpu"}, "leave it at auto"),
        ({"kv_format": "int8"}, "no KV cache in 'int8'"),
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
STORED = [
    ({"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": W4}}}, "w4a16-g128"),
    ({"config_groups": {"g": {"weights": W8, "input_activations": {"num_bits": 8}}}}, "w8a8"),
    ({"config_groups": {"g": {"weights": {"num_bits": 8, "type": "float"}}}}, "fp8"),
    ({"quant_method": "gptq", "bits": 4, "group_size": 32}, "w4a16-g32"),
    ({"quant_method": "awq", "bits": 4, "group_size": 128}, "w4a16-g128"),
]


@pytest.mark.parametrize(("config", "scheme"), STORED)
def test_a_format_that_the_checkpoint_has_is_no_change(config: dict[str, Any], scheme: str, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "q", config)
    assert arguments(folder, format=scheme) == arguments(folder) == [folder, *HEAD[1:]]
    with pytest.raises(ConfigError, match=f"stores them \\({scheme}\\), not as --format w2a2"):
        arguments(folder, format="w2a2")
    with pytest.raises(ConfigError, match="not as --format bf16"):
        arguments(folder, format="bf16")


def test_dense_formats_and_caches(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "dense", None)
    assert arguments(folder, format="bf16")[3:5] == ["--dtype", "bfloat16"]
    assert arguments(kv_format="fp8")[3:5] == ["--kv-cache-dtype", "fp8_e4m3"]


def test_models(tmp_path: Path) -> None:
    assert (Path(vllm.model_path("embedded")) / "config.json").is_file()
    (tmp_path / "m.gguf").write_bytes(b"")
    for name in (str(tmp_path / "m.gguf"), str(tmp_path / "nothing"), "nothing", "a/b/c"):
        with pytest.raises(ModelLoadError):
            vllm.model_path(name)


def test_own_flags() -> None:
    assert arguments(more="--enforce-eager --gpu-memory-utilization 0.8")[-3:] == [
        "--enforce-eager",
        "--gpu-memory-utilization",
        "0.8",
    ]
    for more in ("-tp 2 -pp 2 -ep", "-O3", "--config-format hf", "--max-num-partial-prefills 2"):
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


def test_no_torch() -> None:
    code = (
        "import sys; from sameseed.config import SpecConfig; from sameseed.export import vllm; "
        "[vllm.arguments('embedded', {'draft': SpecConfig(m, d)}, vllm.Spread(), 'm') for m, d in "
        "(('ngram', None), ('suffix', None), ('draft_model', 'embedded-head'))]; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
