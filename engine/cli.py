"""The command line: ``inference-lab lab | generate | run | doctor | version``.

Nothing heavy is imported until a command needs it, so ``--help`` answers at once.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from engine import __version__

if TYPE_CHECKING:
    from engine.core.outputs import ClosedRequest, OpenedRequest, TokenEvent
    from engine.core.trace import RequestTrace, StepTrace
    from engine.llm import LLM

DEFAULT_PORT = 8501
DTYPES = ("auto", "float32", "bfloat16", "float16")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: arguments without the program's name; None reads the process's own.

    Returns:
        0 when it worked; 1 when ``doctor`` found a problem, or an experiment did not give what it expects;
        2 for a mistake in what was asked, told in one line on stderr.
    """
    arguments = build_parser().parse_args(argv)
    try:
        return int(arguments.command(arguments) or 0)
    except (ValueError, OSError, ImportError, RuntimeError) as error:
        print(f"inference-lab: {_one_line(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130


def settle_threads(threads: int | None) -> None:
    """Say how many threads OpenMP uses and how they wait. libgomp reads this when torch loads, and never again."""
    from engine.serve.client import host_environment

    os.environ.update(host_environment(dict(os.environ), threads))


def build_parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    parser = argparse.ArgumentParser(
        prog="inference-lab", description="See how a language model is served: a real engine, live in the browser."
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_lab(commands)
    _add_generate(commands)
    _add_run(commands)
    _add_doctor(commands)
    version = commands.add_parser("version", help="print the version")
    version.set_defaults(command=_version)
    return parser


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", default="smollm2", help="smollm2 (embedded, the default), tiny (random weights), a folder, or a hub name"
    )
    parser.add_argument(
        "--device", default="auto", help="cpu, cuda, cuda:1 …; auto (the default) takes a GPU if there is one"
    )
    parser.add_argument("--dtype", default="auto", choices=DTYPES, help="number format of weights and KV cache")
    parser.add_argument("--threads", type=_positive, help="CPU threads of the engine")


def _add_kernel_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--attention-backend",
        default="auto",
        choices=("auto", "sdpa", "triton"),
        help="what computes attention: auto (the default) takes Triton's kernels on a GPU where they prove right",
    )
    parser.add_argument("--enforce-eager", action="store_true", help="no CUDA graphs")


def _add_lab(commands: Any) -> None:
    lab = commands.add_parser("lab", help="start the lab in the browser")
    _add_model_options(lab)
    _add_kernel_options(lab)
    lab.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 lets other machines in")
    lab.add_argument("--port", type=_port, default=DEFAULT_PORT, help=f"port to listen on (default {DEFAULT_PORT})")
    lab.set_defaults(command=_lab)


def _add_generate(commands: Any) -> None:
    generate = commands.add_parser("generate", help="generate text in the terminal")
    generate.add_argument("prompt", help="the prompt; - reads it from standard input")
    _add_model_options(generate)
    _add_kernel_options(generate)
    generate.add_argument("--raw", action="store_true", help="send the prompt as it is, without the model's chat template")
    generate.add_argument(
        "--stats", action="store_true", help="print token counts and latencies at the end, on standard error"
    )
    sampling = generate.add_argument_group("sampling")
    sampling.add_argument("--max-tokens", type=_positive, default=256, help="most tokens to generate (default 256)")
    sampling.add_argument("--temperature", type=float, default=0.7, help="0 is greedy (default 0.7)")
    sampling.add_argument("--top-k", type=int, default=0, help="keep the k most likely tokens; 0 keeps all (default)")
    sampling.add_argument(
        "--top-p", type=float, default=0.95, help="keep the likeliest tokens that reach p together (default 0.95)"
    )
    sampling.add_argument(
        "--min-p", type=float, default=0.0, help="drop tokens less likely than min-p times the likeliest (default 0)"
    )
    sampling.add_argument("--repetition-penalty", type=float, default=1.0, help="above 1 discourages repeating (default 1)")
    sampling.add_argument("--seed", type=int, help="makes a sampled text repeatable")
    sampling.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be given again"
    )
    sampling.add_argument("--ignore-eos", action="store_true", help="go on past the end-of-sequence token")
    engine = generate.add_argument_group("engine")
    engine.add_argument("--max-model-len", type=_positive, help="longest prompt plus output, tokens")
    engine.add_argument("--max-num-batched-tokens", type=_positive, help="token budget of a step")
    engine.add_argument("--block-size", type=_positive, help="tokens in a KV block")
    engine.add_argument("--num-kv-blocks", type=_positive, help="KV blocks in the pool")
    engine.add_argument(
        "--gpu-memory-utilization", type=float, metavar="SHARE",
        help="share of the GPU's memory to fill, above 0 and at most 1: sizes the pool in place of --num-kv-blocks",
    )  # fmt: skip
    generate.set_defaults(command=_generate)


def _add_run(commands: Any) -> None:
    run = commands.add_parser("run", help="run an experiment: the same requests on several configurations, compared")
    run.add_argument("file", metavar="FILE", help="an experiment file (YAML or JSON), or the name of a ready-made one")
    _add_model_options(run)
    run.set_defaults(model=None)
    run.add_argument("--repetitions", type=_positive, help="measured runs of each variant (default: what the file says)")
    run.add_argument("--json", action="store_true", help="print the whole result as JSON instead of a table")
    run.add_argument("--report", metavar="PATH", help="write an HTML report with charts there")
    run.set_defaults(command=_run)


def _add_doctor(commands: Any) -> None:
    doctor = commands.add_parser("doctor", help="what this machine offers, what is in the way, what to do")
    doctor.add_argument("--port", type=_port, default=DEFAULT_PORT, help=f"port to look at (default {DEFAULT_PORT})")
    doctor.add_argument("--model", help="check the GPU's kernels in the shapes of this model (default: of the tiny one)")
    doctor.add_argument("--json", action="store_true", help="print facts and findings as JSON")
    doctor.add_argument("--no-measure", action="store_true", help="skip the short speed measurement")
    doctor.set_defaults(command=_doctor)


def _lab(arguments: argparse.Namespace) -> int:
    from app.server import run

    run(
        model=arguments.model,
        device=arguments.device,
        dtype=arguments.dtype,
        host=arguments.host,
        port=arguments.port,
        threads=arguments.threads,
        attention_backend=arguments.attention_backend,
        enforce_eager=arguments.enforce_eager,
    )
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    from engine.doctor import run

    settle_threads(None)
    return run(port=arguments.port, as_json=arguments.json, measure=not arguments.no_measure, model=arguments.model)


def _run(arguments: argparse.Namespace) -> int:
    from pathlib import Path

    from engine.serve.experiments import run_file
    from engine.workload.experiment import load_experiments, read_experiment
    from engine.workload.results import text_report, with_repetitions, write_result

    path = Path(arguments.file)
    ready = None if path.suffix or path.exists() else load_experiments()
    if ready is not None:
        experiment = ready.find(arguments.file)
        if experiment is None:
            names = ", ".join(each.id for each in ready.experiments)
            raise ValueError(f"there is no experiment {arguments.file!r}: give a file, or one of {names}")
    else:
        experiment = read_experiment(path)
    if arguments.repetitions is not None:
        experiment = with_repetitions(experiment, arguments.repetitions)
    result = run_file(
        experiment,
        model=arguments.model or experiment.model,
        device=arguments.device,
        dtype=arguments.dtype,
        threads=arguments.threads,
        on_progress=_ProgressLine(),
    )
    if arguments.report:
        from app.experiments.exports import report

        Path(arguments.report).write_text(report(result), encoding="utf-8")
    if arguments.json:
        sys.stdout.write(write_result(result).decode() + "\n")
    else:
        print(text_report(result))
    return 0 if all(outcome.holds for outcome in result.outcomes()) else 1


class _ProgressLine:
    """An experiment's progress on standard error: one line that is overwritten for a person, one a run in a log."""

    def __init__(self) -> None:
        self._last = ""

    def __call__(self, progress: Any) -> None:
        left = "" if progress.seconds_left is None else f", about {progress.seconds_left:,.0f} s left"
        line = f"{progress.done} of {progress.total} runs: {progress.text}{left}"
        if line == self._last:
            return
        if sys.stderr.isatty():
            print(f"\r\033[K{line}", end="\n" if progress.state != "running" else "", file=sys.stderr, flush=True)
        elif progress.text != self._last:
            print(line, file=sys.stderr, flush=True)
            line = progress.text
        self._last = line


def _version(arguments: argparse.Namespace) -> int:
    print(f"inference-lab {__version__}")
    return 0


def _generate(arguments: argparse.Namespace) -> int:
    from engine.core.sampling_params import SamplingParams

    prompt = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    params = SamplingParams(
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        min_p=arguments.min_p,
        repetition_penalty=arguments.repetition_penalty,
        seed=arguments.seed,
        max_tokens=arguments.max_tokens,
        stop=tuple(arguments.stop),
        ignore_eos=arguments.ignore_eos,
    )
    if not prompt.strip():
        raise ValueError("the prompt is empty: give at least one character that is not a space")
    printer = Printer()
    llm = _load(arguments, printer)
    if arguments.raw or not llm.tokenizer.has_chat_template:
        (output,) = llm.generate(prompt, params)
    else:
        (output,) = llm.chat([{"role": "user", "content": prompt}], params)
    print(flush=True)
    (completion,) = output.outputs
    if arguments.stats:
        print(summary(output.metrics, llm.model.info.title, llm.model.info.device), file=sys.stderr)
    if completion.finish_reason == "error":
        raise RuntimeError(completion.error)
    return 0


class Printer:
    """Writes text to the terminal as it becomes certain."""

    def __init__(self) -> None:
        self.written = 0

    def opened(self, event: OpenedRequest) -> None:
        """Nothing to write yet."""

    def token(self, event: TokenEvent) -> None:
        """Write what this token made certain."""
        self._write(event.text)

    def closed(self, event: ClosedRequest) -> None:
        """Write what had been held back."""
        self._write(event.text[self.written :])

    def stepped(self, step: StepTrace) -> None:
        """Steps are not shown here."""

    def _write(self, text: str) -> None:
        self.written += len(text)
        print(text, end="", flush=True)


def summary(trace: RequestTrace, title: str, device: str) -> str:
    """Counts and latencies of one finished request, on one line."""
    parts = [f"{title} on {device}", f"{trace.prompt_tokens} prompt tokens", f"{trace.output_tokens} output tokens"]
    parts += [
        f"{name} {1000 * seconds:.1f} ms"
        for name, seconds in (("TTFT", trace.ttft), ("TPOT", trace.tpot), ("E2E", trace.e2e_latency))
        if seconds is not None
    ]
    if trace.tpot:
        parts.append(f"{1 / trace.tpot:.1f} tokens/s while decoding")
    return " · ".join([*parts, f"ended: {trace.finish_reason}"])


def _load(arguments: argparse.Namespace, listener: Printer) -> LLM:
    from engine import LLM

    settle_threads(arguments.threads)
    names = ("max_model_len", "max_num_batched_tokens", "block_size", "num_kv_blocks", "gpu_memory_utilization")
    settings = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    return LLM(
        arguments.model,
        device=arguments.device,
        dtype=arguments.dtype,
        attention_backend=arguments.attention_backend,
        enforce_eager=arguments.enforce_eager,
        listener=listener,
        progress=_tell_progress,
        **settings,
    )


def _tell_progress(stage: str, fraction: float | None) -> None:
    """One line that is overwritten, where a person watches; nothing in a log."""
    if sys.stderr.isatty():
        done = "" if fraction is None else f" {fraction:.0%}"
        end = "\r\033[K" if fraction == 1 else ""
        print(f"\r\033[K{stage}{done}", end=end, file=sys.stderr, flush=True)


def _positive(text: str) -> int:
    """A whole number of at least 1, for argparse."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 1")
    return int(text)


def _port(text: str) -> int:
    """A TCP port, for argparse; 0 lets the system choose."""
    if not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} must be a port number from 1 to 65535")
    return int(text)


def _one_line(error: BaseException) -> str:
    """What went wrong, on one line."""
    return " ".join(str(error).split()) or type(error).__name__


if __name__ == "__main__":
    raise SystemExit(main())
