"""Everything that needs an NVIDIA GPU, in one go: ``make gpu-check`` or ``python -m engine.bench.gpu_check``.

It needs torch, transformers, numpy, pytest, msgspec and this repository (``pip install -c constraints.txt -e '.[test]'``)
and downloads nothing. On a machine that pip can't reach, put the missing packages on PYTHONPATH. It runs tests/cuda,
measures the copy bandwidth and the matrix rate of the GPU, and the engine's speed beside them, on the tiny model and,
where it is installed, on the embedded one. Results: out/gpu_check.json and out/gpu_check.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def main(argv: Sequence[str] | None = None) -> int:
    """Check the GPU; returns 0 when all passed, or when there is no GPU to check; 1 when something failed."""
    parser = argparse.ArgumentParser(
        prog="python -m engine.bench.gpu_check", description="Tests and speeds that need a GPU."
    )
    parser.add_argument("--out", type=Path, default=ROOT / "out", help="folder for the results (default: out/)")
    parser.add_argument("--skip-tests", action="store_true", help="measure only")
    arguments = parser.parse_args(argv)
    import torch

    if not torch.cuda.is_available():
        print(
            f"no CUDA device: nothing was checked (torch {torch.__version__}, built for CUDA {torch.version.cuda or 'none'})"
        )
        return 0
    started = time.perf_counter()
    print(f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}, CUDA {torch.version.cuda}\n", flush=True)
    passed = arguments.skip_tests or run_tests()
    runs = measure_models()
    document: dict[str, object] = {
        "gpu": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "tests": "skipped" if arguments.skip_tests else "passed" if passed else "failed",
        "seconds": time.perf_counter() - started,
        "runs": runs,
    }
    write(document, arguments.out)
    failed = not passed or any("error" in run for run in runs)
    print(json.dumps(document))
    return int(failed)


def run_tests() -> bool:
    """Run tests/cuda in a process of its own, so that a crashed kernel does not end the check."""
    command = [sys.executable, "-m", "pytest", "tests/cuda", "-q", "-p", "no:cacheprovider"]
    return subprocess.run(command, cwd=ROOT, check=False).returncode == 0


def measure_models() -> list[dict[str, object]]:
    """Speeds of the tiny model in float32 and of the embedded one in bfloat16; a failure is recorded, not raised."""
    from engine.bench.speed import benchmark
    from engine.doctor import has_embedded_model

    wanted = [("tiny", "float32")]
    if has_embedded_model():
        wanted.append(("smollm2", "bfloat16"))
    else:
        print("The embedded model is not installed: its speed is not measured.", flush=True)
    runs: list[dict[str, object]] = []
    for model, dtype in wanted:
        try:
            runs.append(benchmark(model, "cuda", dtype))
        except Exception as error:  # one broken model must not hide the others' results
            print(f"{model}: {type(error).__name__}: {error}", flush=True)
            runs.append({"model": model, "dtype": dtype, "error": f"{type(error).__name__}: {error}"})
    return runs


def write(document: dict[str, object], folder: Path) -> None:
    """Store the results as JSON and as a page for people."""
    from engine.bench.ceilings import Ceilings
    from engine.bench.speed import Speed, table

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gpu_check.json").write_text(json.dumps(document, indent=2) + "\n")
    lines = [
        f"# GPU check: {document['gpu']}",
        "",
        f"torch {document['torch']}, CUDA {document['cuda']}; tests: {document['tests']}",
        "",
    ]
    runs = document["runs"]
    assert isinstance(runs, list)
    for run in runs:
        lines += [f"## {run['model']}, {run['dtype']}", ""]
        if "error" in run:
            lines += [f"Failed: {run['error']}", ""]
        else:
            lines += [table([Speed(**speed) for speed in run["speeds"]], Ceilings(**run["ceilings"])), ""]
    (folder / "gpu_check.md").write_text("\n".join(lines))
    print(f"Wrote {folder / 'gpu_check.json'} and gpu_check.md.")


if __name__ == "__main__":
    raise SystemExit(main())
