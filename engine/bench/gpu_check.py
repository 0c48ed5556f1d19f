"""Everything that needs an NVIDIA GPU, in one go: ``make gpu-check`` or ``python -m engine.bench.gpu_check``.

It runs tests/cuda, measures what the GPU can do at best, and then the engine's speeds on random weights of real shapes, each
beside its ceiling and its goal, and transformers on the same shapes. It takes less than 8 minutes on an H200 and downloads
nothing. Results: out/gpu_check.json and out/gpu_check.md.

It needs torch, transformers, numpy, pytest, msgspec, safetensors, tokenizers, jinja2 and this folder. On a machine that pip
can't reach, put what is missing on PYTHONPATH and call the module. First try ``--quick``: tiny shapes on the same code in
about a minute. ``--device cpu --quick`` does that without a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path

from engine.bench.gpu_report import Document, Result, Suite, describe_machine, one_line, page, slug, tell, write

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 455.0
"""For everything: under 8 minutes."""
START_SECONDS = 15.0
"""Until the first measure begins: two processes import torch, and one of them makes a CUDA context."""
TEST_SECONDS = 150.0
"""For tests/cuda, most of it for compiling: each number format, block size and head size has kernels of its own."""
LAST_WORDS = 10.0
"""Seconds that pytest gets to write its report when it is stopped."""
PYTEST_INI = """[pytest]
addopts = --strict-markers --import-mode=importlib
markers =
    cuda: needs an NVIDIA GPU
    soak: takes minutes
faulthandler_timeout = {patience:.0f}
"""
"""Our own, so that neither the version of pytest nor its plugins matter."""


def main(argv: Sequence[str] | None = None) -> int:
    """Check the GPU; returns 0 when all ran, or when there is no GPU to check; 1 when a test or a measure failed.

    A goal that is missed is not a failure of the check: the table says it.
    """
    started = time.perf_counter()
    options, parser = _options(argv)
    import torch

    from engine.bench.gpu_measures import with_kernels

    if options.device.startswith("cuda") and not torch.cuda.is_available():
        cuda = torch.version.cuda or "none"
        tell(f"no CUDA device: nothing was checked (torch {torch.__version__}, built for CUDA {cuda})")
        return 0
    if options.device == "cpu" and not options.quick:
        parser.error("--device cpu needs --quick: real shapes would take hours without a GPU")
    machine = describe_machine(options.device)
    tell(f"{machine.get('gpu', machine['cpu'])}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    wanted = _wanted(options.only, parser)
    tests = _tests(options)
    results = _measure(wanted, options, options.seconds - (time.perf_counter() - started))
    with_kernels(results)
    document = Document(
        machine=machine, tests=tests, results=results, quick=options.quick, seconds=time.perf_counter() - started
    )
    _store(document, options)
    return int(document.failed)


def _options(argv: Sequence[str] | None) -> tuple[argparse.Namespace, argparse.ArgumentParser]:
    parser = argparse.ArgumentParser(
        prog="python -m engine.bench.gpu_check", description="Tests and speeds that need an NVIDIA GPU."
    )
    parser.add_argument("--out", type=Path, default=ROOT / "out", help="folder for the results (default: out/)")
    parser.add_argument("--keep", type=Path, help="folder for a copy named after the GPU, such as docs/gpu")
    parser.add_argument("--only", metavar="NAME,…", help="only these measures, and the ceilings; 'list' names them all")
    parser.add_argument("--skip-tests", action="store_true", help="measure only")
    parser.add_argument("--device", default="cuda:0", help="cuda:0 (default), or cpu, which needs --quick")
    parser.add_argument("--quick", action="store_true", help="tiny shapes and short runs: shows that everything runs")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for everything together (default: %(default)s)")
    parser.add_argument(
        "--here", action="store_true", help="measure in this process, for a debugger: a crash then ends the whole check"
    )
    return parser.parse_args(argv), parser


def _wanted(only: str | None, parser: argparse.ArgumentParser) -> list[str]:
    """Names of the measures to take, in their order; the ceilings are always among them."""
    from engine.bench.gpu_measures import MEASURES

    names = [measure.name for measure in MEASURES]
    chosen = {"ceilings", *only.split(",")} if only else set(names)
    unknown = sorted(chosen - set(names))
    if unknown:
        parser.error(f"--only {unknown[0]}: no such measure; there are {', '.join(names)}")
    return [name for name in names if name in chosen]


def _tests(options: argparse.Namespace) -> Suite:
    if options.skip_tests or options.device == "cpu":
        return Suite("skipped", "Not asked for." if options.skip_tests else "There is no GPU.")
    limit = min(TEST_SECONDS, options.seconds / 2)
    tests = run_tests(options.out, limit)
    tell(f"  tests/cuda: {tests.status}. {tests.summary} [{tests.seconds:.0f} s]")
    return tests


def _measure(wanted: list[str], options: argparse.Namespace, seconds: float) -> list[Result]:
    from engine.bench.gpu_worker import Job, supervise, work

    job = Job(measures=wanted, device=options.device, quick=options.quick, seconds=seconds)
    if not options.here:
        return supervise(job, options.out, lambda result: tell(one_line(result)))
    results: list[Result] = []

    def hear(message: object) -> None:
        if isinstance(message, Result):
            results.append(message)
            tell(one_line(message))

    work(job, hear)
    return results


def _store(document: Document, options: argparse.Namespace) -> None:
    """Write the results, show the table, and end with one line of JSON."""
    written = write(document, options.out, "gpu_check")
    if options.keep:
        written += write(document, options.keep, slug(document.machine))
    tell("\n" + page(document))
    tell(f"Wrote {', '.join(map(str, written))} after {document.seconds:.0f} s.")
    summary = {result.name: result.reading.value if result.reading else result.status for result in document.results}
    missed = [result.name for result in document.results if result.met is False]
    tell(json.dumps({"tests": document.tests.status, "results": summary, "goals_missed": missed}))


# ---------------------------------------------------------------------- tests


PYTEST = "import signal, sys, pytest; signal.signal(signal.SIGINT, signal.default_int_handler); sys.exit(pytest.main())"
"""pytest that can be interrupted, also where Ctrl+C is ignored: what runs in the background of a shell inherits that."""


def run_tests(folder: Path, limit: float, tests: str = "tests/cuda") -> Suite:
    """Run tests in a process of their own, which a crashed kernel can end without ending the check.

    Args:
        folder: for pytest's configuration and report.
        limit: seconds after which they are stopped.
        tests: folder of the tests.
    """
    from engine.bench.gpu_worker import QUIET, stop

    folder.mkdir(parents=True, exist_ok=True)
    ini, report, log = (folder.resolve() / f"gpu_tests.{kind}" for kind in ("ini", "xml", "log"))
    ini.write_text(PYTEST_INI.format(patience=0.8 * limit))
    report.unlink(missing_ok=True)
    command = [sys.executable, "-c", PYTEST, tests, "-v", "-p", "no:cacheprovider", "-c", str(ini), f"--rootdir={ROOT}"]
    # The tests' common conftest.py needs hypothesis, which these tests don't.
    command += [f"--confcutdir={tests}", f"--junitxml={report}"]
    start = time.perf_counter()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, **QUIET}, stdout=output, stderr=output, start_new_session=True
        )
        try:
            code: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
            _interrupt(process)
        finally:
            stop(process)
    found = read_report(report, code, limit)
    found.seconds = time.perf_counter() - start
    if found.status == "failed":
        found.output = log.read_text(errors="replace")[-6000:]
    return found


def _interrupt(process: subprocess.Popen[bytes]) -> None:
    """Ask pytest to end as Ctrl+C would: what it found so far is in its report then."""
    with contextlib.suppress(OSError, ValueError, subprocess.TimeoutExpired):
        process.send_signal(signal.SIGINT)
        process.wait(LAST_WORDS)


def read_report(report: Path, code: int | None, limit: float) -> Suite:
    """What pytest's JUnit report says; ``code`` is its exit code, None when it was stopped at ``limit``."""
    stopped = f"Stopped after {limit:.0f} s"
    try:
        suite = ElementTree.parse(report).getroot().find("testsuite")
        assert suite is not None
        counts = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    except (OSError, ElementTree.ParseError, AssertionError, ValueError):
        if code is None:
            return Suite("failed", f"{stopped}.")
        return Suite("failed", f"pytest ended with code {code} and left no report.")
    failures = []
    for case in suite.iter("testcase"):
        problem = case.find("failure") if case.find("failure") is not None else case.find("error")
        if problem is not None:
            first_line = (problem.get("message") or "no message").splitlines()[0]
            failures.append(f"{case.get('name')}: {first_line[:200]}")
    bad = counts["failures"] + counts["errors"]
    passed = counts["tests"] - bad - counts["skipped"]
    summary = f"{passed} passed, {bad} failed, {counts['skipped']} skipped."
    if code is None:
        return Suite("failed", f"{stopped}; by then {summary}", failures)
    if counts["tests"] and counts["skipped"] == counts["tests"]:
        return Suite("skipped", summary)
    return Suite("passed" if code == 0 else "failed", summary, failures)


if __name__ == "__main__":
    raise SystemExit(main())
