"""Runs standard API clients against sameseed's server, and records whether their results are right.

    .venv/bin/python benchmarks/clients/run.py --python VENV/bin/python openai langchain-openai litellm
    .venv/bin/python benchmarks/clients/run.py --python VENV/bin/python lm-eval

`--python` is the interpreter of an environment that has the clients installed. A client's text is right if it equals
the text that the engine generates without a server. A likelihood is right if it is what lm-eval gets directly from the
engine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sameseed import LLM, SamplingParams
from sameseed.models.loader import resolve_model
from sameseed.report import record

HERE = Path(__file__).parent
OUT = HERE.parent / "results" / "clients.jsonl"
MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "Tell a story"}]
PROMPTS = HERE.parents[1] / "sameseed" / "assets" / "prompts_heldout.jsonl"
NUM_ROWS = 24
METRICS = ("acc", "word_perplexity", "exact_match")
TASKS = ("tiny_choice", "tiny_rolling", "tiny_generate")
TOLERANCE = 1e-4  # nats, because the harness sums float32 values in another order


class Server:
    """A context manager that runs `sameseed serve` with the embedded pair, and returns its URL."""

    def __enter__(self) -> str:
        command = [sys.executable, "-m", "sameseed", "serve", "--port", "0", "--max-num-seqs", "8"]
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self._process.stderr is not None
        for line in self._process.stderr:
            entry = json.loads(line)
            if entry["message"] == "ready":
                subprocess.Popen(["cat"], stdin=self._process.stderr, stdout=subprocess.DEVNULL)
                return str(entry["url"])
        raise SystemExit("the server did not start")

    def __exit__(self, *error: object) -> None:
        self._process.terminate()
        self._process.wait()


def run(command: list[str], **environment: str) -> str:
    """The standard output of a command. Exits with the command's output if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
    if done.returncode:
        raise SystemExit(done.stdout[-3000:] + done.stderr[-3000:])
    return done.stdout


def texts(client: str) -> Callable[[str, str], dict[str, Any]]:
    """A check that requests texts with a client (ask.py), and compares each with the engine's own text."""

    def check(python: str, url: str) -> dict[str, Any]:
        made = json.loads(run([python, str(HERE / "ask.py"), client, url]).splitlines()[-1])
        llm, params = LLM("embedded"), SamplingParams(max_tokens=24)
        own = {"chat": llm.chat(MESSAGES, params).text, "completion": llm.generate("def add(a, b):", params)[0].text}
        own["responses"] = own["chat"]
        found = {name: text == own[name.partition(",")[0]] for name, text in made.pop("texts").items()}
        return {"ran": sorted(found), "equal_to_the_engine": found, **made, "passed": all(found.values())}

    return check


def lm_eval(python: str, url: str) -> dict[str, Any]:
    """Check lm-eval over the server: likelihoods by echo with logprobs, and generation.

    Prompts are sent as token ids, as text, and with the server's tokenizer; also over chat.
    """
    target = str(resolve_model("embedded"))
    common = f"model=embedded,base_url={url}/v1/completions,num_concurrent=4"
    local = f"{common},tokenizer_backend=huggingface,tokenizer={target},add_bos_token=True"
    ways: dict[str, tuple[str, str, tuple[str, ...]]] = {
        "token ids": ("local-completions", local, TASKS),
        "text": ("local-completions", f"{local},tokenized_requests=False", TASKS),
        "tokenizer of the server": ("local-completions", common, TASKS),
        "chat": ("local-chat-completions", common.replace("/v1/completions", "/v1/chat/completions"), TASKS[2:]),
    }
    with tempfile.TemporaryDirectory() as folder:
        write_tasks(Path(folder))

        def samples(name: str, module: str, model: str, settings: str, tasks: tuple[str, ...]) -> dict[str, list[Any]]:
            out = Path(folder) / name.replace(" ", "-")
            command = [python, "-m", module, "run", "--model", model, "--model_args", settings, "--log_samples"]
            command += ["--tasks", ",".join(tasks), "--include_path", folder, "--output_path", str(out)]
            command += ["--batch_size", "8"] if model == "local-completions" else []
            command += ["--apply_chat_template"] if "chat" in model else []
            run(command, HF_HUB_OFFLINE="1", HF_DATASETS_CACHE=folder)
            lines = {t: next(out.rglob(f"samples_{t}_*.jsonl")).read_text().splitlines() for t in tasks}
            return {t: [json.loads(line)["resps"] for line in lines[t]] for t in tasks}

        own = samples("own", "sameseed.measure.lm_eval", "sameseed", "pretrained=embedded", TASKS)
        got = {name: samples(name, "lm_eval", *way) for name, way in ways.items()}
    errors = {name: largest(own["tiny_choice"], got[name]["tiny_choice"]) for name in ("token ids", "text")}
    same = {name: own["tiny_generate"] == got[name]["tiny_generate"] for name in ("token ids", "text")}
    errors["tokenizer of the server, rolling"] = largest(
        own["tiny_rolling"], got["tokenizer of the server"]["tiny_rolling"]
    )
    return {
        "ran": sorted(ways),
        "num_samples": len(own["tiny_choice"]),
        "largest_difference_nats": errors,
        "generations_equal": same,
        "passed": max(errors.values()) < TOLERANCE and all(same.values()),
    }


def write_tasks(folder: Path) -> None:
    """Write three small local tasks, one for each kind of request, from the packaged prompts."""
    prompts = [json.loads(line) for line in PROMPTS.read_text().splitlines()]
    texts = [p["messages"][0]["content"] if "messages" in p else p["prompt"] for p in prompts]
    texts = [t for t in texts if len(t) > 120][:NUM_ROWS]
    cut = [t.index(" ", 60) for t in texts]
    ends = [t[at : at + 30] for t, at in zip(texts, cut, strict=True)]
    rows = [
        {"q": texts[i][: cut[i]], "options": [ends[i], ends[i - 1], ends[i - 2]], "gold": 0} for i in range(len(texts))
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shared: dict[str, Any] = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}},
        "test_split": "test",
        "doc_to_text": "{{q}}",
    }
    until = {"until": ["\n\n"], "max_gen_toks": 16, "do_sample": False}
    kinds: list[dict[str, Any]] = [
        {"output_type": "multiple_choice", "doc_to_choice": "{{options}}", "doc_to_target": "{{gold}}"},
        {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{q}}"},
        {"output_type": "generate_until", "doc_to_target": "{{q}}", "generation_kwargs": until},
    ]
    for name, kind, metric in zip(TASKS, kinds, METRICS, strict=True):
        task = {"task": name, **shared, **kind, "metric_list": [{"metric": metric}]}
        (folder / f"{name}.yaml").write_text(json.dumps(task))  # JSON is YAML


def largest(a: Any, b: Any) -> float:
    """The largest difference of numbers in two nested lists; infinite if other values differ."""
    if isinstance(a, list) and isinstance(b, list):
        return max((largest(x, y) for x, y in zip(a, b, strict=True)), default=0.0)
    try:
        return abs(float(a) - float(b))
    except ValueError:
        return 0.0 if a == b else float("inf")


CLIENTS: dict[str, Callable[[str, str], dict[str, Any]]] = {
    "openai": texts("openai"),
    "langchain-openai": texts("langchain_openai"),
    "litellm": texts("litellm"),
    "lm-eval": lm_eval,
}


def main() -> None:
    """Run the clients, print each result, and append its record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clients", nargs="+", choices=sorted(CLIENTS))
    parser.add_argument("--python", default=sys.executable, help="an environment that has the clients")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    for client in args.clients:
        script = f"import importlib.metadata as m; print(m.version('{client}'))"
        with Server() as url:
            found = CLIENTS[client](args.python, url)
        line: dict[str, Any] = {"schema": "sameseed.clients/1", "time": record.now(), "commit": record.commit()}
        line |= {
            "machine": record.machine(),
            "client": client,
            "version": run([args.python, "-c", script]).strip(),
            **found,
        }
        print(json.dumps({k: v for k, v in line.items() if k not in ("machine", "schema")}))
        with args.out.open("a") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
