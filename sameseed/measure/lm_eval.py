"""sameseed as a model of lm-evaluation-harness: the harness's tasks run on the engine's own kernels and formats.

    from sameseed.measure.lm_eval import SameseedLM
    lm_eval.simple_evaluate(model=SameseedLM("embedded", format="w4a8"), tasks=["arc_easy"])

or the harness's own command, with this model registered:

    python -m sameseed.measure.lm_eval run --model sameseed --model_args pretrained=embedded --tasks arc_easy
"""

from __future__ import annotations

import io
import json
import logging
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence as Seq
from contextlib import redirect_stderr
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from sameseed.engine.llm import LLM
from sameseed.errors import ConfigError, RequestError
from sameseed.measure.quality.perplexity import log_likelihoods
from sameseed.measure.quality.tasks import EvalSettings, Report, Splits, TaskResult, answer, read_rows, silent
from sameseed.request import SamplingParams

try:
    import datasets
    import lm_eval
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    needed = f"this needs lm-evaluation-harness ({error}): pip install '.[eval]'"
    if __name__ == "__main__":
        print(f"error: {needed}", file=sys.stderr)
        sys.exit(2)
    raise ConfigError(needed) from None

MAX_TOKENS = 256
FEWSHOT_SEED = 1234  # the harness's default
INVALID = "[invalid]"  # the harness's mark for an answer from which no result could be extracted
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")  # named as in SamplingParams
LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # the first that is given counts
IGNORED = {"do_sample", "until", "max_length", "skip_special_tokens", *LENGTHS}
END = "\ufdd0"  # of an answer that the model continues; a noncharacter, so in no text


@register_model("sameseed")
class SameseedLM(TemplateLM):
    """The harness's model interface over sameseed.

    `pretrained`: a loaded LLM, or a model name; then `settings` are keyword arguments of LLM. `batch_size` and
    `max_batch_size` come from the harness and are ignored: batching is continuous. `report(done, total)` counts
    answers. `num_cut`: prompts that were longer than the context and were cut at their beginning. `notes`: what became
    of the answers.
    """

    def __init__(
        self,
        pretrained: str | LLM = "embedded",
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        report: Callable[[int, int], None] = lambda done, total: None,
        **settings: Any,
    ) -> None:
        super().__init__()
        # The harness passes a GPU as the device when the user chose none.
        self._device = device if device and (torch.cuda.is_available() or not device.startswith("cuda")) else "cpu"
        self.llm = LLM(pretrained, device=self._device, **settings) if isinstance(pretrained, str) else pretrained
        self.name = pretrained if isinstance(pretrained, str) else "sameseed"
        self.report = report
        self.num_cut, self.notes = 0, tuple[str, ...]()

    @property
    def tokenizer_name(self) -> str:
        """Name under which the harness caches the chat template."""
        return self.name.replace("/", "__")

    @property
    def eot_token_id(self) -> int:
        return self.llm.engine.runner.model.config.eos_token_ids[0]

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without context: BOS, or the first EOS token of a model without BOS."""
        bos = self.llm.engine.runner.model.config.bos_token_id
        return self.eot_token_id if bos is None else bos

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        return self.llm.tokenizer.encode(string, add_special_tokens is not False)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The conversation in the chat template; without the generation prompt the model continues the last message."""
        if add_generation_prompt:
            return self.llm.tokenizer.render_chat(chat_history)
        *before, last = chat_history
        text = self.llm.tokenizer.render_chat([*before, {**last, "content": last["content"] + END}], False)
        return text[: text.rindex(END)]

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """As the harness cuts them, but a last token that spans both belongs to the continuation."""
        before, after = super()._encode_pair(context, continuation)
        whole = [] if after or not continuation else self.tok_encode(context + continuation)
        return (whole[:-1], whole[-1:]) if whole else (before, after)

    def _loglikelihood_tokens(self, requests: list[Any], **kwargs: Any) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation given its context, and whether greedy decoding would generate it."""
        pairs = [(before or [self.prefix_token_id], after) for _, before, after in requests]
        longest = self.llm.engine.max_model_len + 1
        self.num_cut += sum(len(before) + len(after) > longest for before, after in pairs)
        # An empty continuation has probability 1 (log-likelihood 0) and always agrees with greedy decoding.
        scores = iter(log_likelihoods(self.llm.engine, [pair for pair in pairs if pair[1]], self.report))
        found = [next(scores) if after else (0.0, True) for _, after in pairs]
        return self._kept("loglikelihood", [texts for texts, _, _ in requests], found)

    def loglikelihood_rolling(self, requests: Iterable[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of each whole text after the BOS token, in windows as long as the model's context."""
        requests, pairs, counts = list(requests), list[tuple[list[int], list[int]]](), []
        for request in requests:
            tokens, length = self.tok_encode(request.args[0], False), self.llm.engine.max_model_len
            windows = list(get_rolling_token_windows(tokens, self.prefix_token_id, length, 1))
            pairs += map(make_disjoint_window, windows)
            counts.append(len(windows))
        scores = iter(log_likelihoods(self.llm.engine, pairs))
        found = [sum(next(scores)[0] for _ in range(count)) for count in counts]
        return self._kept("loglikelihood_rolling", [r.args for r in requests], found)

    def generate_until(self, requests: Iterable[Any], disable_tqdm: bool = False) -> list[str]:
        """The text generated after each context, up to a stop string (which is not included)."""
        requests = list(requests)
        params = [_params(r.args[1]) for r in requests]
        prompts = [self._prompt(r.args[0], p.max_tokens) for r, p in zip(requests, params, strict=True)]
        found, cut = answer(self.llm, prompts, params, self.report)
        self.notes += cut
        return self._kept("generate_until", [r.args for r in requests], found)

    def _prompt(self, context: str, max_tokens: int) -> list[int]:
        """The context's last tokens that leave room for the answer, for which at most half of the context is kept."""
        tokens = self.llm.tokenizer.encode(context) if context else [self.prefix_token_id]
        longest = self.llm.engine.max_model_len
        room = max(1, longest - min(max_tokens, longest // 2))
        self.num_cut += len(tokens) > room
        return tokens[-room:]

    def _kept(self, kind: str, arguments: Seq[Any], found: list[Any]) -> list[Any]:
        """Add the results to the harness's cache, and return them."""
        for each, result in zip(arguments, found, strict=True):
            self.cache_hook.add_partial(kind, each, result)
        return found


def _params(given: Mapping[str, Any]) -> SamplingParams:
    """SamplingParams from the harness's generation arguments. Raises RequestError for an unsupported argument."""
    until = given.get("until") or ()
    stop = (until,) if isinstance(until, str) else tuple(s for s in until if s)
    length = next((given[k] for k in LENGTHS if given.get(k)), MAX_TOKENS)
    for name, value in given.items():
        if name not in SAMPLING and name not in IGNORED and (name, value) != ("num_beams", 1):
            raise RequestError(f"generation argument {name!r} has no meaning here; leave it out of --gen_kwargs")
    chosen: dict[str, Any] = {k: given[k] for k in SAMPLING if given.get(k) is not None}
    if given.get("do_sample") is False:
        chosen["temperature"] = 0.0
    return SamplingParams(max_tokens=int(length), stop=stop, **({"seed": 0} | chosen))


def run_harness(llm: LLM, name: str, settings: EvalSettings, report: Report = silent) -> TaskResult:
    """Run a task on a loaded model. Raises ConfigError as `read_rows` does."""
    splits, notes = read_rows(name, settings)
    s, differs = settings, {}  # differs: generation settings that override the task's own
    if s.temperature > 0:
        differs = {"do_sample": True, "temperature": s.temperature, "top_p": s.top_p, "seed": s.seed}
    if s.max_tokens is not None:
        differs["max_gen_toks"] = s.max_tokens
    model = SameseedLM(llm, report=partial(report, name))
    # Silence the harness's progress bars and messages, which would mix with this program's.
    with TemporaryDirectory() as folder, redirect_stderr(io.StringIO()):
        datasets.disable_progress_bars()
        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        tasks = _write_tasks(name, splits, Path(lm_eval.__file__).parent / "tasks", Path(folder))
        loaded = TaskManager(include_path=folder, include_defaults=False).load(tasks)
        for task in loaded["tasks"].values():
            task.set_fewshot_seed(seed=FEWSHOT_SEED)
            task.set_config(key="generation_kwargs", value=differs, update=True)
        found = lm_eval.evaluate(
            lm=model,
            task_dict=loaded,
            bootstrap_iters=0,
            apply_chat_template=settings.chat,
            fewshot_as_multiturn=settings.chat,
        )
    samples = [sample for task in tasks for sample in found["samples"][task]]
    if model.num_cut:
        length = llm.engine.max_model_len
        notes += (f"{model.num_cut} prompts lost their beginning: the model's context has {length} tokens",)
    return _result(name, samples, notes + model.notes)


def _write_tasks(name: str, splits: Splits, theirs: Path, folder: Path) -> list[str]:
    """Write the rows, and task files that include the harness's own but read these rows; returns the tasks' names."""
    files = {}
    for split, rows in splits.items():
        files[split] = str(folder / f"{split}.jsonl")
        Path(files[split]).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    if name == "gsm8k":
        sources = {name: theirs / "gsm8k" / "gsm8k.yaml"}
    else:  # a task for each subject
        subjects = sorted({row["category"].replace(" ", "_") for row in splits["test"]})
        sources = {f"{name}_{s}": theirs / name / f"{name}_{s}.yaml" for s in subjects}
    for task, source in sources.items():
        if not source.is_file():
            raise ConfigError(f"lm-evaluation-harness has no {source.stem!r}; is this the data of {name}?")
        where = {"data_files": files, "cache_dir": str(folder)}
        own = {"dataset_path": "json", "dataset_name": None, "dataset_kwargs": where}
        # JSON is YAML.
        (folder / f"{task}.yaml").write_text(json.dumps({"include": str(source), "task": task, **own}))
    return list(sources)


def _result(name: str, samples: Seq[dict[str, Any]], notes: tuple[str, ...]) -> TaskResult:
    """A TaskResult from the harness's samples: score and generated answer of each question."""
    asked = [s for s in samples if s["filter"] != "strict-match"]
    scores = tuple(float(s["exact_match"]) for s in asked)
    missing = sum(s["filtered_resps"][0] == INVALID for s in asked)
    answers = tuple(s["resps"][0][0] for s in asked)
    if name == "gsm8k":
        strict = [s["exact_match"] for s in samples if s["filter"] == "strict-match"]
        extra = {"strict": sum(strict) / len(strict), "without_number": missing}
        return TaskResult(name, "exact match", scores, extra, notes, answers)
    subjects: dict[str, list[float]] = defaultdict(list)
    for score, sample in zip(scores, asked, strict=True):
        subjects[sample["doc"]["category"]].append(score)
    extra = {
        # Per subject, because the overall mean weights each subject by its number of questions.
        "subjects": {s: {"value": sum(v) / len(v), "num_questions": len(v)} for s, v in sorted(subjects.items())},
        "without_letter": missing,
        "chance": sum(1 / len(s["doc"]["options"]) for s in asked) / len(asked),
    }
    return TaskResult(name, "accuracy", scores, extra, notes, answers)


def main() -> None:
    """The harness's own command, with this model registered."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()
