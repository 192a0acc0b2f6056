"""Twins of the embedded pair, made by the command: the same text and acceptance in another shape."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from fixtures_models import all_logits, load

from sameseed import LLM, SamplingParams
from sameseed.cli import main
from sameseed.models.loader import load_tokenizer, resolve_model

SHAPE = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 576, "intermediate_size": 1024, "num_hidden_layers": 12,
    "num_attention_heads": 12, "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 4500,
    "tie_word_embeddings": True, "rms_norm_eps": 1e-5,
}  # fmt: skip
PROMPTS = ["Tom has 3 boxes with 12 pencils each. How many pencils are there?", "def add(a, b):"]


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Twins of the embedded target and draft in the shape above."""
    root = tmp_path_factory.mktemp("twins")
    (root / "shape").mkdir()
    (root / "shape" / "config.json").write_text(json.dumps(SHAPE))
    for name in ("target", "draft"):
        assert main(["twin", "--shape", str(root / "shape"), "--of", f"embedded-{name}", "-o", str(root / name)]) == 0
    return root / "target", root / "draft"


def written(model: str, draft: str, **how: object) -> list[tuple[tuple[int, ...], int, int]]:
    """For each prompt: its tokens, the number of accepted tokens and of draft tokens."""
    spec = {"draft": draft, "policy": "fixed", "num_draft_tokens": 3, "draft_format": "bf16"}  # 8 bits would differ
    llm = LLM(model, **spec, format="bf16", kv_format="fp32", max_model_len=256)  # type: ignore[arg-type]
    params = SamplingParams(max_tokens=24, seed=3, ignore_eos=True, **how)  # type: ignore[arg-type]
    prompts = [llm.tokenizer.chat([{"role": "user", "content": text}]) for text in PROMPTS]
    done = llm.generate(prompts, params)
    return [(c.token_ids, c.metrics.spec.num_accepted_tokens, c.metrics.spec.num_draft_tokens) for c in done]


@pytest.mark.parametrize("how", [{}, {"temperature": 0.8}])
def test_twins_write_and_accept_what_the_pair_does(twins: tuple[Path, Path], how: dict[str, object]) -> None:
    own = written("embedded-target", "embedded-draft", **how)
    assert written(str(twins[0]), str(twins[1]), **how) == own
    assert sum(accepted for _, accepted, _ in own) > 10


def test_the_command_says_what_it_wrote(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["twin", "--shape", "embedded", "--of", "embedded-draft", "-o", str(tmp_path / "t"), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    files = sum(f.stat().st_size for f in tmp_path.glob("t/*.safetensors"))
    assert said["bytes"] <= files < said["bytes"] + 20_000
    assert said["layers"] == [0, 5] and said["hidden_offsets"] == [0]


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["-o", "t"], "--shape is missing"),
        (["--shape", "llama-3.2-1b"], "-o is missing"),
        (["--shape", "lama-3.2-1b", "-o", "t"], "did you mean 'llama-3.2-1b'"),
        (["--shape", "embedded", "--of", "no-such", "-o", "t"], "no model at 'no-such'"),
        (["--shape", "llama-3.2-1b", "--of", "embedded-target", "-o", "/dev/null/t"], "error:"),
    ],
)
def test_bad_input(argv: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["twin", *argv]) == 2
    assert named in capsys.readouterr().err


def test_quantization_disturbs_a_twin_as_much_as_its_model(twins: tuple[Path, Path]) -> None:
    def log_probs(model: str, scheme: str) -> torch.Tensor:
        llm = load(resolve_model(model), weights=scheme, backend="auto")
        return all_logits(llm, tokens)[:, :4096].log_softmax(-1).double()

    chat = [{"role": "user", "content": text} for text in PROMPTS]
    tokens = load_tokenizer(resolve_model("embedded")).chat(chat)
    true = log_probs("embedded-target", "bf16")
    own, twin = (
        float((true.exp() * (true - log_probs(model, "w4a8"))).sum(1).mean())
        for model in ("embedded-target", str(twins[0]))
    )
    assert 0.001 < own < 0.1
    assert own / 1.5 < twin < own * 1.5
