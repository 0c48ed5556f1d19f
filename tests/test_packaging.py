"""The files that make the project installable say what is true of the code."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

import engine

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TEXT_SUFFIXES = {
    ".py",
    ".md",
    ".toml",
    ".txt",
    ".js",
    ".css",
    ".html",
    ".json",
    ".jsonl",
    ".yml",
    ".yaml",
    ".cfg",
    ".csv",
    "",
}


def tracked_files() -> list[Path]:
    """Files of the repository: git's list, or all but ignored folders where there is no git."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listing.returncode == 0 and listing.stdout:
        return [ROOT / name for name in listing.stdout.split("\0") if name and (ROOT / name).is_file()]
    skipped = {".venv", "build", "dist", "out", "__pycache__", ".git"}
    return [path for path in ROOT.rglob("*") if path.is_file() and not skipped & set(path.relative_to(ROOT).parts)]


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def distribution(module: str) -> str:
    """The package that brings a module, where their names differ."""
    return {"yaml": "pyyaml", "pynvml": "nvidia-ml-py"}.get(module, normal(module))


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_dependency_is_pinned_inside_its_range():
    from packaging.requirements import Requirement

    pinned = {normal(name): version for name, version in pins().items()}
    wanted = PROJECT["dependencies"] + [line for extra in PROJECT["optional-dependencies"].values() for line in extra]
    for line in wanted:
        requirement = Requirement(line)
        if normal(requirement.name) == "inference-lab":
            continue
        assert normal(requirement.name) in pinned, f"{requirement.name} is not in constraints.txt"
        assert requirement.specifier.contains(pinned[normal(requirement.name)]), (
            f"{line}: pinned {pinned[normal(requirement.name)]}"
        )


def test_pins_are_plain():
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        assert line.startswith("#") or re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9][A-Za-z0-9.]*", line), line
    assert pins()["torch"] == "2.13.0"


def test_installed_dependencies_of_dependencies_are_pinned():
    from packaging.requirements import Requirement

    pinned = {normal(name) for name in pins()}
    seen: set[str] = set()
    queue = [Requirement(line).name for line in PROJECT["dependencies"]]
    while queue:
        name = normal(queue.pop())
        if name in seen:
            continue
        seen.add(name)
        try:
            requires = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        needed = [Requirement(line) for line in requires]
        queue += [need.name for need in needed if need.marker is None or need.marker.evaluate({"extra": ""})]
    # The CUDA build of torch brings its own libraries; torch pins these itself.
    cuda = {name for name in seen if name.startswith(("nvidia-", "triton", "cuda-"))}
    assert seen - cuda <= pinned, f"not in constraints.txt: {sorted(seen - cuda - pinned)}"


def test_imported_packages_are_declared():
    from packaging.requirements import Requirement

    declared = {normal(Requirement(line).name) for line in PROJECT["dependencies"]}
    # Comes with torch on a GPU; a peer in an environment of its own; the browser, for those who measure pages.
    optional = {"triton", "vllm", "playwright"}
    here = {"engine", "app", "lessons", "tests"}
    found: dict[str, str] = {}
    for folder in ("engine", "app", "lessons"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                names = []
                if isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                    names = [node.module]
                for name in names:
                    found.setdefault(name.split(".")[0], str(path.relative_to(ROOT)))
    third = {name: where for name, where in found.items() if name not in sys.stdlib_module_names and name not in here}
    missing = {name: where for name, where in third.items() if distribution(name) not in declared | optional}
    assert not missing, f"imported but not in pyproject.toml: {missing}"


def test_version_is_told_once():
    assert re.fullmatch(r"\d+\.\d+\.\d+", engine.__version__)
    assert PROJECT["dynamic"] == ["version"]


def test_licence_is_apache_2():
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text
    assert PROJECT["license"] == "Apache-2.0"


# Written in two halves, so that this file does not hold what it looks for.
FORBIDDEN = {
    "a package registry's host": re.compile(
        "pypi" + r"\.org|python" + r"hosted\.org|registry\.npm" + r"js|deb\.deb" + r"ian\.org"
    ),
    "a download address": re.compile(
        r"https?://\S+\.(whl|tar\.gz|tgz|deb|zip)\b|download\.pytorch" + r"\.org|(extra-)?index" + "-url"
    ),
    "a path of one machine": re.compile(
        r"(?<![\w.~])/(work|root|farm)" + r"/[\w.]|/tmp" + r"/\w+|/opt/py" + r"pi|/home" + r"/\w+/"
    ),
}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_file_names(what: str):
    hits = []
    for path in tracked_files():
        if path.suffix not in TEXT_SUFFIXES or path.name == "LICENSE":
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        hits += [
            f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
            for number, line in enumerate(text.splitlines(), 1)
            if FORBIDDEN[what].search(line)
        ]
    assert not hits, f"{what} in:\n" + "\n".join(hits)


def test_wheel_holds_packages_and_assets(tmp_path: Path):
    source = tmp_path / "source"
    for path in tracked_files():
        target = source / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    (source / "assets").mkdir(exist_ok=True)
    (source / "assets" / "probe.json").write_text("{}")
    build = "import setuptools.build_meta as b, sys; print(b.build_wheel(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", build, str(tmp_path)],
        cwd=source,
        capture_output=True,
        text=True,
        env={**os.environ},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = [p.relative_to(ROOT).as_posix() for p in tracked_files() if p.suffix == ".py"]
    shipped = [name for name in sources if name.split("/")[0] in ("engine", "app", "lessons")]
    assert set(shipped) <= names
    assert "app/assets/probe.json" in names
    data = [
        p.relative_to(ROOT).as_posix()
        for p in tracked_files()
        if p.suffix in (".yaml", ".md", ".txt", ".csv", ".js", ".css")
    ]
    needed = [name for name in data if name.split("/")[0] in ("app", "lessons")]
    needed += ["app/" + name for name in data if name.startswith("assets/")]
    assert needed and set(needed) <= names
    assert not [name for name in names if name.startswith(("tests/", "assets/"))]
    entry = next(name for name in names if name.endswith("entry_points.txt"))
    assert "inference-lab = engine.cli:main" in zipfile.ZipFile(wheel).read(entry).decode()


def test_make_help_lists_the_documented_targets():
    make = shutil.which("make")
    if make is None:
        pytest.skip("make is not installed")
    listed = subprocess.run([make, "-s", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for target in (
        "lab",
        "test",
        "check",
        "browser-test",
        "kernel-test",
        "gpu-check",
        "screenshots",
        "bench",
        "soak",
        "doctor",
        "clean",
    ):
        assert f"  {target} - " in listed
