"""The `sameseed` command as a user sees it: what it prints where, its exit codes, and its messages for bad input."""

import itertools
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from fixtures_server import start
from lawkit import write_model

from sameseed import LLM
from sameseed.cli import COMMANDS, main
from sameseed.report import record

LONG = 4000  # tokens: seconds of work, so that an interruption comes in the middle

FIXED = ("--policy", "fixed")  # a policy that measures time may draft nothing


@pytest.fixture
def cli(pair_folders, capsys, tmp_path, monkeypatch):
    """Runs a command in this process on the tiny pair; returns exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*argv, model=pair_folders[0]):
        chosen = ["--model", str(model)] if model is not None else []
        code = main([argv[0], *chosen, *argv[1:]])
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.fixture(scope="module")
def slow_model(tmp_path_factory):
    """A model with room for a long text. The tests ban its end token."""
    folder = tmp_path_factory.mktemp("slow")
    write_model(folder, max_position_embeddings=2 * LONG)
    return folder


def long_run(model, *more):
    flags = ["--max-tokens", str(LONG), "--ignore-eos", "--backend", "reference"]
    return ["generate", "the sum of", "--model", str(model), *flags, *more]


@pytest.mark.parametrize("prompt", ["the list is", "für Größe 🙂 你好"])
def test_show_draft_only_adds_marks(cli, pair_folders, prompt):
    flags = ["--draft", str(pair_folders[1]), *FIXED, "--ignore-eos"]
    flags += ["--max-tokens", "60", "--temperature", "0.9", "--seed", "1"]
    _, plain, _ = cli("generate", prompt, *flags)
    _, marked, err = cli("generate", prompt, *flags, "--show-draft")
    assert marked != plain
    assert marked.replace("\u2039", "").replace("\u203a", "") == plain
    assert marked.count("\u2039") == marked.count("\u203a") > 0
    assert "accepted" in err and "60 tokens in" in err


def test_json_is_one_line_a_completion_and_nothing_else(cli):
    flags = ["--n", "3", "--temperature", "1", "--seed", "5", "--max-tokens", "9", "--logprobs", "2", "--json"]
    code, out, _ = cli("generate", "the", *flags)
    lines = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and sorted(line["index"] for line in lines) == [0, 1, 2]
    assert len({tuple(line["token_ids"]) for line in lines}) > 1
    for line in lines:
        assert line["finish_reason"] in ("stop", "length")
        assert set(line["metrics"]["time_split_s"]) == {"draft", "target", "verify", "schedule"}
        assert [p["token_id"] for p in line["logprobs"]] == line["token_ids"]
        assert all(len(p["top"]) == 2 and p["logprob"] <= 0 for p in line["logprobs"])


def test_texts_go_to_stdout_one_after_the_other_and_summaries_to_stderr(cli):
    flags = ["--n", "2", "--temperature", "1", "--seed", "5", "--max-tokens", "9", "--ignore-eos"]
    code, out, err = cli("generate", "the", *flags)
    assert code == 0 and out.endswith("\n") and out.index("--- 1 of 2 ---") < out.index("--- 2 of 2 ---")
    assert err.count("9 tokens in") == err.count("tokens/s") == 2 and "tokens in" not in out


def test_prompt_from_file_and_from_stdin(cli, tmp_path, monkeypatch):
    (tmp_path / "prompt.txt").write_text("the sum of\n", encoding="utf-8-sig")
    named = (["the sum of"], ["--file", str(tmp_path / "prompt.txt")])
    read = [cli("generate", *words, "--max-tokens", "12", "--json")[1] for words in named]
    for named in ([], ["-"]):
        monkeypatch.setattr(sys, "stdin", (tmp_path / "prompt.txt").open())
        read.append(cli("generate", *named, "--max-tokens", "12", "--json")[1])
    ids = [json.loads(line)["token_ids"] for line in read]
    assert ids == [ids[0]] * 4


def test_chat_reads_turns_from_a_pipe(cli, tmp_path, monkeypatch):
    (tmp_path / "turns").write_text("hello\n\n/more of it\n/reset\nhello\n/exit\nnever\n")
    monkeypatch.setattr(sys, "stdin", (tmp_path / "turns").open())
    code, out, _ = cli("chat", "--max-tokens", "8", "--json")
    lines = [json.loads(line) for line in out.splitlines()]
    assert (code, len(lines)) == (0, 3)
    assert lines[0]["token_ids"] == lines[2]["token_ids"], "/reset forgets the conversation"
    assert lines[1]["metrics"]["num_prompt_tokens"] > 2 * lines[0]["metrics"]["num_prompt_tokens"]


def test_info_json_names_the_registries(cli):
    code, out, _ = cli("info", "--json", model=None)
    found = json.loads(out)
    assert code == 0 and found["machine"]["cores"] >= 1
    assert {"reference", "cpu"} <= set(found["backends"]) and found["backends"]["reference"]["runs_here"]
    assert found["drafters"]["ngram"]["options"]["max_ngram"] >= 1
    assert found["formats"]["int4"]["bits_per_weight"] == 4.125
    assert {"embedded", "embedded-draft", "embedded-head"} <= set(found["models"])


def test_info_lists_end_and_special_tokens_of_a_model(cli, pair_folders):
    code, out, _ = cli("info", "--json", model=str(pair_folders[0]))
    (model,) = json.loads(out)["models"].values()
    assert code == 0 and any("config.json" in line for line in model["end_tokens"])
    assert any("<|end|>" in line and "tokenizer_config.json" in line for line in model["special_tokens"])


def test_bench_writes_valid_records(cli, pair_folders, tmp_path):
    prompts, out_file = tmp_path / "p.jsonl", tmp_path / "records" / "r.jsonl"
    prompts.write_text('{"prompt": "the sum"}\n{"messages": [{"role": "user", "content": "the list"}]}\n')
    flags = ["--prompts", str(prompts), "--drafts", "ngram", str(pair_folders[1]), "--ks", "2"]
    asked = "--temperatures 0 0.8 --batch-sizes 1 2 --repeat 2 --max-tokens 10 --json --out"
    code, out, _ = cli("bench", *flags, *asked.split(), str(out_file))
    assert code == 0
    records = record.read(out_file)
    assert [json.loads(line) for line in out.splitlines()] == records
    assert len(records) == 3 * 2 * 2  # ways to decode x temperatures x batch sizes
    assert {r["run"] for r in records} == {records[0]["run"]}
    for r in records:
        assert r["equals_plain"] and len(r["repetitions"]) == 2
        assert str(tmp_path) not in json.dumps(r) and os.uname().nodename not in json.dumps(r["machine"])


def test_bench_checks_its_whole_grid_first(cli, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.txt").write_text("the sum\n")
    asked = "bench --prompts p.txt --ks 2 3 --temperatures 0 --repeat 1 --max-tokens 4"
    flags = asked.split()
    code, out, err = cli(*flags, "--drafts", "ngram", "--formats", "auto", "w4a9", "--json")
    assert code == 2 and "did you mean 'w4a8'" in err and not out, "a slip in the second format costs nothing"
    grid = ["--drafts", "self_quant", "ngram", "--formats", "auto", "w8a8", "--draft-format", "w8a8"]
    code, out, err = cli(*flags, *grid, "--plot", "p.png", "--json")
    assert code == 0 and err.count("left out:") == 1 and "self_quant, target in w8a8" in err
    ran = [json.loads(line)["config"]["draft"] for line in out.splitlines()]
    assert ran == ["none", "self_quant", "self_quant", "ngram", "ngram", "none", "ngram", "ngram"]
    assert (tmp_path / "p.png").stat().st_size and (tmp_path / "p.svg").stat().st_size
    code, _, err = cli(*flags, "--drafts", "self_quant", "--formats", "w8a8", "--draft-format", "w8a8")
    assert code == 2 and "in as many bits" in err, "nothing is left"


def test_completion_knows_commands_and_flags(cli, tmp_path):
    _, script, _ = cli("completion", model=None)
    (tmp_path / "sameseed").write_text(f'#!/bin/sh\nexec {sys.executable} -m sameseed "$@"\n')
    (tmp_path / "sameseed").chmod(0o755)
    ask = "COMP_CWORD=1; COMP_WORDS=(sameseed pro); _sameseed; echo ${COMPREPLY[@]}\n"
    ask += "COMP_CWORD=2; COMP_WORDS=(sameseed twin --sha); _sameseed; echo ${COMPREPLY[@]}\n"
    ask += "COMP_CWORD=2; COMP_WORDS=(sameseed train h); _sameseed; echo ${COMPREPLY[@]}\n"
    ask += "COMP_CWORD=3; COMP_WORDS=(sameseed bench serve --burst); _sameseed; echo ${COMPREPLY[@]}\n"
    ask += "COMP_CWORD=3; COMP_WORDS=(sameseed bench --k --burst); _sameseed; echo ${COMPREPLY[@]}\n"
    where = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", script + ask], capture_output=True, text=True, env=where)
    assert done.stdout.split() == ["profile", "--shape", "head", "--burstiness"], done.stderr


def test_help_answers_without_loading_the_engine():
    check = (
        "import sys\n"
        "from sameseed.cli import COMMANDS, main\n"
        "for argv in ['--help'], *([name, '--help'] for name in COMMANDS):\n"
        "    try:\n        code = main(argv)\n"
        "    except SystemExit as stop:\n        code = stop.code\n"
        "    heavy = {'torch', 'numpy', 'tokenizers', 'sameseed.engine'} & set(sys.modules)\n"
        "    if heavy or code:\n        sys.exit(f'{argv}: exit code {code}, loaded {heavy}')\n"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(f"usage: sameseed {name}" in done.stdout for name in ("COMMAND", *COMMANDS))


def test_a_command_whose_package_is_missing_names_it():
    code = (
        "import sys, importlib.metadata as m; m.entry_points = lambda group: ()\n"
        "from sameseed.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    for name, words in (("train", ["train"]), ("vllm", ["serve", "--engine", "vllm"])):
        done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert f"pip install sameseed-{name}" in done.stderr


def test_version_no_arguments_and_words_that_are_none(capsys):
    for argv, code, said in ((["--version"], 0, "sameseed "), ([], 2, "usage"), (["genrate"], 2, "mean 'generate'")):
        assert main(argv) == code
        assert said in "".join(capsys.readouterr())
    with pytest.raises(SystemExit) as stop:
        main(["generate", "hi", "--temprature", "1"])
    assert stop.value.code == 2
    assert "--temperature" in capsys.readouterr().err


BELOW = '{"below": [{}, {"policy": "goodput"}]}'


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["generate", ""], "the prompt is empty"),
        (["generate", "the " * 500], "shorten the prompt"),
        (["generate", "hi", "--k", "65"], "0..64"),
        (["generate", "hi", "--draft", "ngram", "--confidence", "0.4"], "leave it out"),
        (["generate", "hi", "--draft", "suffix + ngram", "--draft-options", BELOW], "put --policy on the whole"),
        (["generate", "hi", "--draft", "eagle"], "needs a draft head of this target; name its folder"),
        (["generate", "hi", "--logit-bias", "three"], "TOKEN=BIAS"),
        (["generate", "hi", "--system", "x"], "--chat"),
        (["generate", "--file", "/no/such/file"], "No such file"),
        (["generate", "hi", "--model", "/no/such/folder"], "no model at '/no/such/folder'"),
        (["eval", "--model", "/no/such/folder"], "no model at '/no/such/folder'"),
        (["bench", "--repeat", "0"], "--repeat"),
        (["bench", "--overlaps", "0", "1", "--drafts", "ngram"], "add a draft model to --drafts"),
        (["bench", "--out", "/proc/none/r.jsonl"], "choose another with --out"),
    ],
)
def test_bad_input(cli, argv, message):
    code, out, err = cli(*argv)
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and message in err and len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [("{", "no JSON"), ('{"prompt": 3, "x": ""}', "found prompt 3; write"), ("", "holds no prompts")],
)
def test_bad_prompt_file(cli, tmp_path, line, message):
    (tmp_path / "p.jsonl").write_text(line + "\n")
    code, _, err = cli("bench", "--prompts", str(tmp_path / "p.jsonl"))
    assert code == 2 and "p.jsonl" in err and message in err


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_keeps_what_was_written(slow_model, kind):
    process = start(*long_run(slow_model))
    first = process.stdout.read(1)
    process.send_signal(kind)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and first and out.endswith(b"\n")
    assert err.decode().strip().splitlines()[-1] == "interrupted"
    assert b"Traceback" not in err and b"tokens/s" not in err


def test_ctrl_c_with_json_leaves_one_whole_line(cli, monkeypatch):
    whole = json.loads(cli("generate", "the sum", "--max-tokens", "20", "--ignore-eos", "--json")[1])
    stream = LLM.stream

    def interrupted(*args):
        yield from itertools.islice(stream(*args), 5)
        raise KeyboardInterrupt

    monkeypatch.setattr(LLM, "stream", interrupted)
    code, out, err = cli("generate", "the sum", "--max-tokens", "20", "--ignore-eos", "--json")
    line = json.loads(out)
    assert (code, err.strip(), line["finish_reason"]) == (130, "interrupted", "abort")
    assert line["token_ids"] == whole["token_ids"][:5] and whole["text"].startswith(line["text"])


def test_a_reader_that_goes_away_is_no_error(slow_model):
    process = start(*long_run(slow_model))
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.read(1)
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait(timeout=60) == 141


def test_a_full_disk_a_closed_output_and_scarce_memory_are_told(slow_model):
    command = [sys.executable, "-m", "sameseed", *long_run(slow_model, "--max-tokens", "5")]
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 2 and done.stderr.decode() == "error: No space left on device; make room and run again\n"
    for shell, message in (('"$@" <&- >&-', "output is closed"), ('ulimit -v 300000; "$@"', "error: memory ran out")):
        done = subprocess.run(["sh", "-c", shell, "sh", *command], stderr=subprocess.PIPE)
        assert done.returncode == 2 and message in done.stderr.decode().splitlines()[-1]


def test_a_full_disk_loses_no_measurement(cli, tmp_path, monkeypatch):
    monkeypatch.setattr(record, "commit", lambda: "0")  # git would be killed, and leave its lock
    before, given = resource.getrlimit(resource.RLIMIT_FSIZE), "--draft ngram --prompts p.txt --max-tokens 8"
    bench = f"bench {given} --k 2 --temperatures 0 --repeat 1 --out full"
    (tmp_path / "p.txt").write_text("the sum of")
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))  # as a full disk: files can be made, and not filled
    try:
        found = [cli(*text.split()) for text in (bench, f"verify-lossless {given} --only L10 --html full")]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    for (code, out, err), shown in zip(found, ("ngram k=2", "the quantized target"), strict=True):
        assert code == 2 and shown in out and err.splitlines()[-1] == "error: File too large full"


def read_until(terminal, wanted, seen=b""):
    while wanted not in seen:
        seen += os.read(terminal, 4096)
    return seen


def in_terminal(argv):
    """Start the command in a terminal of its own; returns the process and our end of the terminal."""
    import fcntl
    import pty
    import termios

    ours, its = pty.openpty()

    def take_terminal():
        signal.signal(signal.SIGINT, signal.default_int_handler)
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    environment = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")} | {"TERM": "xterm"}
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), its)
    how = {"start_new_session": True, "preexec_fn": take_terminal, "env": environment}
    process = subprocess.Popen([sys.executable, "-m", "sameseed", *argv], **streams, **how)
    os.close(its)
    return process, ours


def test_ctrl_c_in_a_terminal_leaves_it_as_it_was(slow_model):
    import termios

    process, terminal = in_terminal(long_run(slow_model))
    before = termios.tcgetattr(terminal)
    read_until(terminal, b"\x1b[?25h")  # the progress bar of loading is done
    os.read(terminal, 1)
    os.write(terminal, b"\x03")
    seen = read_until(terminal, b"interrupted")
    assert process.wait(timeout=60) == 130
    assert termios.tcgetattr(terminal) == before
    assert b"\x1b[0m\x1b[?25h" in seen and b"Traceback" not in seen
    os.close(terminal)


def test_chat_in_a_terminal(pair_folders):
    flags = ["--model", str(pair_folders[0]), "--draft", str(pair_folders[1]), "--show-draft", "--max-model-len", "128"]
    process, terminal = in_terminal(["chat", *flags])
    read_until(terminal, b"you> ")
    os.write(terminal, b"hello\n")
    seen = read_until(terminal, b"you> ")
    assert b"tokens/s" in seen
    os.write(terminal, b"x" * 600 + b"\n")
    assert b"/reset" in read_until(terminal, b"you> "), "a prompt too long is refused, and the conversation goes on"
    os.write(terminal, b"/exit\n")
    assert process.wait(timeout=60) == 0
    os.close(terminal)


def test_ctrl_c_in_a_chat_stops_the_answer_and_the_conversation_goes_on(slow_model):
    flags = ["--model", str(slow_model), "--max-tokens", str(LONG), "--ignore-eos", "--backend", "reference"]
    process, terminal = in_terminal(["chat", *flags])
    read_until(terminal, b"you> ")
    os.write(terminal, b"hello\n")
    read_until(terminal, b"hello\r\n")
    os.read(terminal, 1)
    os.write(terminal, b"\x03")
    seen = read_until(terminal, b"you> ")
    assert b"interrupted" in seen and b"Traceback" not in seen
    os.write(terminal, b"\x04")
    assert process.wait(timeout=60) == 0
    os.close(terminal)
