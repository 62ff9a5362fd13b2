# One environment for everything: `make demo` trains, `make test` tests. See CONTRIBUTING.md.
SHELL := /bin/bash
PYTHON ?= python3
VENV   ?= .venv
PY     := $(VENV)/bin/python
# On a GPU machine: make TORCH="torch==2.11.0" TORCH_INDEX=https://download.pytorch.org/whl/cu130 FBGEMM=fbgemm-gpu==1.6.0 TORCHREC=torchrec==1.6.1
TORCH       ?= torch==2.13.0
TORCH_INDEX ?=
FBGEMM      ?= fbgemm-gpu-cpu==1.8.0
TORCHREC    ?= torchrec==1.8.0
FBTRITON    ?= fbtriton==3.7.4
RECBOLE     ?= recbole==1.2.1
PIP         := $(PY) -m pip install --quiet --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help env demo results test test-gpu lint types bench clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

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
