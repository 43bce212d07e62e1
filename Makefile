# Motet. `make help` lists the targets.

VENV    := .venv
BIN     := $(VENV)/bin
# Files that say what is installed and up to date. STAMP: all that the targets need. RUNS: only what `make up` needs.
STAMP   := $(VENV)/.up-to-date
RUNS    := $(VENV)/.can-run
TO_RUN  := $(if $(wildcard $(STAMP)),$(STAMP),$(RUNS))
# The requirement of torch in pyproject.toml. torch is installed first and alone: TORCH_INDEX applies to nothing else.
TORCH   := $(shell sed -n 's/^ *"\(torch>=[^"]*\)",*$$/\1/p' pyproject.toml)
COMMA   := ,
PYTHON  ?= $(shell for name in python3.11 python3.12 python3.13 python3 python; do \
             "$$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$name" && break; done)
# The tests of `make check`: of the repository itself, of the shared core, and of policies without processes or sockets.
# Without those that compile the kernels again and again.
FAST    := tests/repo tests/docs tests/common tests/store tests/resources \
           $(filter-out tests/kernels/test_cpp_build.py, $(wildcard tests/kernels/test_*.py)) \
           $(filter-out tests/common/%, $(wildcard \
             tests/*/plan tests/*/policy tests/*/reconcile tests/*/test_policy*.py tests/*/test_model.py))

.DEFAULT_GOAL := help
.PHONY: help venv up down status test lint check format bench soak sanitize mutate compat surface clients kube peer generate site train wheel clean

help:  ## Show this.
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | while IFS="$$(printf '\t')" read -r word text; do \
	  printf '  make %-9s %s\n' "$$word" "$$text"; done

venv: $(STAMP)  ## Set up .venv for everything below (TORCH_INDEX=URL takes torch from there, e.g. an index of CPU-only builds).

HAS_TORCH = $(BIN)/python -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None)'
PIP       = $(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt

# $(call install,EXTRA,WHAT): install the product with an extra of pyproject.toml into .venv, and make .venv if necessary.
define install
@test -n "$(PYTHON)" || { echo "Motet needs Python 3.11 or newer, and none was found. Name it: make PYTHON=/path/to/python3.11 $(or $(firstword $(MAKECMDGOALS)),venv)" >&2; exit 1; }
@"$(PYTHON)" -c 'import venv, ensurepip' 2>/dev/null || { echo "$(PYTHON) cannot make virtual environments. On Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
@test -x $(BIN)/python || { echo "Setting up $(VENV) with $$($(PYTHON) --version)."; "$(PYTHON)" -m venv $(VENV); }
@echo "Downloading into $(VENV), from the Python package index:"
@$(HAS_TORCH) || echo "  torch        runs the model. $(if $(TORCH_INDEX),From $(TORCH_INDEX).,With its GPU libraries it is about 3 GB; without a GPU, TORCH_INDEX=URL of a CPU-only index saves most of that.)"
$(if $(wildcard $(RUNS) $(STAMP)),,@echo "  the product  servers (grpcio$(COMMA) fastapi)$(COMMA) model code (transformers$(COMMA) tokenizers)$(COMMA) database (sqlalchemy): about 70 MB.")
$(2)
@echo "Nothing is installed outside of $(VENV). This runs again only after pyproject.toml or constraints.txt have changed."
@$(HAS_TORCH) || $(PIP) $(if $(TORCH_INDEX),--index-url "$(TORCH_INDEX)") "$(TORCH)"
@$(PIP) --quiet --editable '.[$(1)]'
@touch $@
endef

$(RUNS): pyproject.toml constraints.txt
	$(call install,local)

$(STAMP): pyproject.toml constraints.txt
	$(call install,dev,@echo "  the rest     what tests and checks need (pytest$(COMMA) peft$(COMMA) openai$(COMMA) kubernetes$(COMMA) ruff$(COMMA) mypy): about 90 MB.")

up: $(TO_RUN)  ## Start the whole system with the bundled model; ctrl-C stops it (UP_ARGS='-f FOLDER --runners 2').
	@$(BIN)/motet up $(UP_ARGS)

down: $(TO_RUN)  ## Stop a system that was started with --detach.
	@$(BIN)/motet down $(DOWN_ARGS)

status: $(TO_RUN)  ## Show services, pools and adapters.
	@$(BIN)/motet status $(STATUS_ARGS)

test: venv  ## Run the tests that this machine can run, without the long ones (KUBE=no: none of a cluster; TEST_ARGS='-k NAME').
	@$(BIN)/python -m tools.gate $(if $(filter no,$(KUBE)),--no-kube) $(GATE_ARGS) -- $(TEST_ARGS)

lint: venv  ## Check format, style, types, import contracts and the newest commit's subject.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python -m tools.type_check
	$(BIN)/lint-imports
	$(BIN)/python -m tools.commit_subject

check: lint  ## Run lint and the fast tests; takes about eight minutes.
	$(BIN)/python -m pytest -q -m "not soak" $(FAST)

format: venv  ## Format the code and fix what ruff can fix.
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: venv  ## Run all benchmarks; fails at the end if one missed its target (BENCH_ARGS=--json for scripts).
	@$(BIN)/python -m benchmarks $(BENCH_ARGS)

soak: venv  ## Run the long tests (one builds wheels: the first run installs Zig and auditwheel, 400 MB).
	@$(BIN)/python -c 'import auditwheel, ziglang' 2>/dev/null || $(PIP) --quiet --editable '.[wheels]'
	@$(BIN)/python -m pytest -m soak --timeout 7200 $(TEST_ARGS) || { code=$$?; \
	  test $$code -ne 5 || echo "There are no long tests yet." >&2; exit $$code; }

sanitize: venv  ## Run the kernels' tests and an engine with sanitizers (SANITIZE_ARGS=--soak: for longer).
	@$(BIN)/python -m tools.sanitize $(SANITIZE_ARGS)

mutate: venv  ## Count the small faults in policies that their tests find; takes half an hour (MUTATE_ARGS='--seed 7').
	@$(BIN)/python -m tools.mutate $(MUTATE_ARGS)

compat: venv  ## Run the tests of models with the oldest and the newest transformers (downloads both, 10 MB each), and with vLLM 0.31 (after make peer PEERS=vllm-0.31).
	@$(BIN)/python -m tools.compat $(TEST_ARGS)

surface: venv  ## Compare a version of vLLM with what Motet uses of it; downloads it, 0.5 GB (VLLM=0.33.0).
	@test -n "$(VLLM)" || { echo "Which version? make surface VLLM=0.33.0" >&2; exit 1; }
	@$(BIN)/python -m tools.surface "$(VLLM)"

clients: venv  ## Try published clients against the bundled model; installs each into your cache, 1 GB (CLIENTS='curl openai': only these).
	@$(BIN)/python -m tools.clients $(if $(CLIENTS),--only $(CLIENTS))

kube:  ## Build the Kubernetes tools for the tests of a cluster into your cache; needs Go, takes minutes once.
	@test -n "$(PYTHON)" || { echo "This needs Python 3.11 or newer: make PYTHON=/path/to/python3.11 kube" >&2; exit 1; }
	@"$(PYTHON)" -m tools.kube.build $(KUBE_ARGS)

peer:  ## Build environments with vLLM and llama.cpp into your cache, for benchmarks beside them (PEERS=llama.cpp: one of them); downloads 3.4 GB once.
	@test -n "$(PYTHON)" || { echo "This needs Python 3.11 or newer: make PYTHON=/path/to/python3.11 peer" >&2; exit 1; }
	@"$(PYTHON)" -m tools.peer $(if $(PEERS),--only $(PEERS)) $(if $(TORCH_INDEX),--torch-index "$(TORCH_INDEX)")

generate: venv  ## Write the generated files again: gRPC modules, CRDs, the chart's values and reference pages.
	@PATH="$$PWD/$(BIN):$$PATH" $(BIN)/python tools/generate_api.py
	@$(BIN)/python tools/generate_crds.py
	@$(BIN)/python tools/generate_docs.py
	@$(BIN)/python tools/generate_performance.py
	@$(BIN)/python tools/generate_charts.py

site: venv  ## Build the pages of docs/ into build/site; a browser opens them without a server.
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

train: venv  ## Train the bundled model and its adapters again (about half an hour on one core).
	@$(BIN)/python examples/demo/train.py $(TRAIN_ARGS)

wheel: venv  ## Build the wheels into dist/: a pure one, and for x86-64 and Arm one with the compiled kernels.
	@$(PIP) --quiet --editable '.[wheels]'
	@$(BIN)/python -m tools.wheels

clean:  ## Remove caches and build results; .venv and state directories stay.
	@rm -rf dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	@find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +
