"""The command line as a person meets it: each test runs the real program."""

import io
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import engine
from engine import cli

ROOT = Path(__file__).resolve().parent.parent


def run(*arguments: str, stdin: str | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "engine.cli", *arguments],
        cwd=ROOT, input=stdin, capture_output=True, text=True, timeout=120, check=False, env={**os.environ, **environment},
    )  # fmt: skip


def refused(*arguments: str, **environment: str) -> str:
    """Run what must be refused; return the one line on stderr."""
    done = run(*arguments, **environment)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    return lines[0]


def test_version():
    assert run("version").stdout == f"inference-lab {engine.__version__}\n"


def test_help_names_every_command_and_loads_nothing_heavy():
    code = (
        "import sys\nfrom engine import cli\n"
        "try:\n    cli.main(['--help'])\nexcept SystemExit:\n    pass\n"
        "sys.exit(bool({'torch', 'streamlit', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, "a heavy library was loaded"
    for command in ("lab", "generate", "doctor", "version"):
        assert f"\n    {command} " in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "COMMAND"),
        (["lab", "--port", "70000"], "from 1 to 65535"),
        (["generate", "hello", "--max-tokens", "0"], "whole number of at least 1"),
        (["generate", "hello", "--dtype", "int3"], "int3"),
    ],
)
def test_options_that_make_no_sense_are_named(arguments, said, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("preset", "words"),
    [({}, "spin 10,000"), ({"GOMP_SPINCOUNT": "7"}, "spin 7"), ({"OMP_WAIT_POLICY": "passive"}, "passive")],
)
def test_threads_spin_shortly_unless_the_user_chose(preset, words, monkeypatch):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    told = json.loads(run("doctor", "--json", "--no-measure", **preset).stdout)
    assert told["facts"]["omp_wait"] == words


def test_a_port_in_use_is_named_with_the_way_out():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        line = refused("lab", "--port", str(port), "--model", "tiny")
    assert str(port) in line
    assert "--port" in line


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs a command in this process: (exit code, what it printed, what it complained)."""
    monkeypatch.setattr(os, "environ", os.environ.copy())  # the command settles threads for its own process

    def call(*arguments: str, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        code = cli.main(arguments)
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return call


TINY = ("--model", "tiny", "--device", "cpu", "--ignore-eos")


def test_the_program_generates():
    done = run("generate", "hello", *TINY, "--max-tokens", "8", "--stats")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert "8 output tokens" in done.stderr


def test_a_seed_makes_the_text_repeatable(terminal):
    texts = [
        terminal("generate", "hello", *TINY, "--max-tokens", "12", "--temperature", "1", "--seed", seed)[1] for seed in "334"
    ]
    assert texts[0] == texts[1] != texts[2]


def test_generate_prints_what_the_library_gives(terminal):
    from engine import LLM, SamplingParams

    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    llm = LLM("tiny", device="cpu")
    raw = llm.generate("hello there", params)[0].outputs[0].text
    chat = llm.chat([{"role": "user", "content": "hello there"}], params)[0].outputs[0].text
    options = (*TINY, "--temperature", "0", "--max-tokens", "10")
    assert terminal("generate", "hello there", "--raw", *options) == (0, raw + "\n", "")
    assert terminal("generate", "hello there", *options) == (0, chat + "\n", "")
    assert raw != chat


def test_text_appears_as_it_is_made(monkeypatch, terminal):
    pieces: list[str] = []
    monkeypatch.setattr(cli.Printer, "_write", lambda self, text: pieces.append(text))
    terminal("generate", "hello", *TINY, "--max-tokens", "16", "--temperature", "0")
    assert sum(bool(piece) for piece in pieces) > 4


def test_stats_name_each_latency_and_the_counts(terminal):
    _, _, said = terminal("generate", "hello", *TINY, "--max-tokens", "8", "--stats")
    for name in ("prompt tokens", "8 output tokens", "TTFT", "TPOT", "E2E", "tokens/s", "ended: length"):
        assert name in said


def test_the_prompt_can_come_from_standard_input(terminal):
    options = (*TINY, "--max-tokens", "8", "--temperature", "0")
    typed = terminal("generate", "hello", *options)
    assert terminal("generate", "-", *options, stdin="hello") == typed
    assert terminal("generate", "-", *options, stdin="another prompt") != typed


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["generate", " "], "empty"),
        (["generate", "hello", "--temperature", "-1"], "temperature=-1"),
        (["generate", "hello", "--top-p", "1.5"], "top_p=1.5"),
        (["generate", "hello", "--model", "no/such/folder/here"], "no/such/folder/here"),
        (["generate", "hello " * 400, "--model", "tiny", "--max-model-len", "64"], "64"),
        (["generate", "hello", "--model", "tiny", "--device", "cuda:99"], "cuda"),
    ],
)
def test_what_cannot_work_is_one_clear_line(arguments, said, terminal):
    code, printed, complained = terminal(*arguments)
    assert (code, printed) == (2, "")
    assert said in complained
    assert complained.count("\n") == 1
