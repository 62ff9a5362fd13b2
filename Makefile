# One environment for everything: `make demo` trains, `make test` tests. See CONTRIBUTING.md.
SHELL := /bin/bash
PYTHON ?= python3
VENV   ?= .venv
PY     := $(VENV)/bin/python
# On a GPU machine: make TORCH="torch==2.11.0" TORCH_INDEX=https://download.pytorch.org/whl/cu130 \
#                        FBGEMM=fbgemm-gpu==1.6.0 TORCHREC=torchrec==1.6.1
TORCH       ?= torch==2.13.0
TORCH_INDEX ?=
FBGEMM      ?= fbgemm-gpu-cpu==1.8.0
TORCHREC    ?= torchrec==1.8.0
FBTRITON    ?= fbtriton==3.7.4
RECBOLE     ?= recbole==1.2.1
PIP         := $(PY) -m pip install --quiet --disable-pip-version-check
# Two test processes at a time, one thread each; a test that hangs is ended.
WORKERS     ?= 2
PYTEST      := OMP_NUM_THREADS=1 $(PY) -m pytest -n $(WORKERS) --dist worksteal --timeout 300

.DEFAULT_GOAL := help
.PHONY: help env demo results test test-plain test-interpret test-emulator test-kernels-all test-gpu lint bench clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

env: $(VENV)/.ready ## set up the virtual environment

$(VENV)/.ready: Makefile requirements-dev.txt pyproject.toml
	@command -v g++ >/dev/null || { echo "g++ is missing: torch.compile needs it on a CPU (Debian: apt-get install g++)"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed: make PYTHON=python3.11"; exit 1; }
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "$(TORCH)"
	$(PIP) -r requirements-dev.txt
	# --no-deps: TorchRec asks for a CUDA build of fbgemm, which cannot load on a CPU; RecBole is here for its data file alone.
	$(PIP) --no-deps "$(FBGEMM)" "$(TORCHREC)" "$(RECBOLE)"
	# fbtriton is the `triton` package with TLX in it, so a stock triton has to go first.
	$(PY) -m pip uninstall --quiet --yes triton 2>/dev/null || true
	$(PIP) --no-deps "$(FBTRITON)"
	$(PIP) --no-deps --editable .
	touch $@

demo: env ## train on a synthetic click log, one epoch on MovieLens-100k, then a tiny Kunlun model
	$(PY) examples/train_ranking.py --data synthetic --out out/synthetic
	$(PY) examples/train_ranking.py --data movielens --epochs 1 --out out/movielens
	$(PY) examples/train_kunlun.py --tiny --out out/kunlun

results: env ## train all seeds and models of docs/ranking.md
	$(PY) examples/ranking_results.py

test: lint test-plain test-interpret test-emulator ## all checks and tests that need no GPU

test-plain: env ## the tests that need neither a GPU nor an interpreter
	$(PYTEST) -m "not gpu and not interpret and not sweep" --ignore tests/emulator

test-interpret: env ## the Triton kernels under Triton's interpreter
	TRITON_INTERPRET=1 $(PYTEST) -m interpret tests/test_semantics.py tests/test_compile.py tests/interpret

test-emulator: env ## the TLX kernels under the emulator
	TRITON_INTERPRET=1 $(PYTEST) -m "not gpu and not slow" tests/emulator

test-kernels-all: env ## every mutant, a thousand seeds more, every configuration of the TLX kernels, compiled ranks: hours
	$(PYTEST) -m sweep tests/aot tests/scaling
	TRITON_INTERPRET=1 $(PYTEST) -m slow tests/emulator

# A thread for each worker: references in float64 run on the CPU, and the threads of all workers at once take many times as long.
test-gpu: env ## the tests that need a CUDA GPU
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 4 --dist worksteal -m gpu --timeout 300

lint: env ## formatting, lints and types
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

bench: env ## time what runs on this machine against its peers
	$(PY) -m jagged_attn.bench --out out/bench.csv --plot out/bench.png

clean: ## remove the environment and all outputs
	rm -rf $(VENV) out build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
