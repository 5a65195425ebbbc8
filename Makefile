# Works on a fresh clone with nothing but python3 and make; `make help` lists the targets.

PYTHON ?= python3
VENV   ?= .venv
EXTRAS ?= cu13,mpich,test,plot
N      ?= 4

# VENV= (empty) runs everything with $(PYTHON) as it is, for machines that cannot install.
PY    := $(if $(VENV),$(VENV)/bin/python,$(PYTHON))
MPIRUN ?= $(if $(VENV),$(VENV)/bin/mpirun,mpirun)
comma := ,
READY := $(if $(VENV),$(VENV)/.installed-$(subst /,_,$(PYTHON))-$(subst $(comma),-,$(EXTRAS)))
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

help: ## list the targets
	@sed -n 's/^\([a-z][a-z-]*\):[^#]*## \(.*\)/\1\t\2/p' $(firstword $(MAKEFILE_LIST)) | \
	    awk -F '\t' '{printf "  make %-17s%s\n", $$1, $$2}'

# Made anew when pyproject.toml changes, or another PYTHON or other EXTRAS are asked for.
$(VENV)/.installed-%: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	    { echo "$(PYTHON) is missing or older than Python 3.10; name another one: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	    { echo "$(PYTHON) cannot make a virtual environment; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@echo "making $(VENV) with $$($(PYTHON) --version) (once, about a minute)"
	@rm -rf $(VENV)
	@$(PYTHON) -m venv $(VENV)
	@$(VENV)/bin/python -m pip install -qq --disable-pip-version-check -e '.[$(EXTRAS)]'
	@touch $@

demo: $(READY) ## real data gathered by N=4 ranks, compared with MPI
	@case "$(N)" in ''|*[!0-9]*|0*) echo "N=$(N): expected a number of ranks from 1" >&2; exit 2;; esac
	$(MPIRUN) -n $(N) $(PY) -m lamport_numba demo

test: lint ## lint, then every test that needs no GPU
	$(PY) -m pytest

test-setup: $(READY) ## the whole matrices of set-up and teardown (faults, deaths, delays), some minutes
	$(PY) -m pytest -m setup_matrix

test-faults: $(READY) ## every death of a rank at every place, some minutes
	$(PY) -m pytest -m 'faults_matrix or not faults_matrix' tests/test_faults_*.py

soak: $(READY) ## SECONDS=600 of random calls, resets, replays and fresh instances on N=4 ranks; nothing may grow
	$(MPIRUN) -n $(N) $(PY) tests/soak.py --seconds $(or $(SECONDS),600)

test-gpu: $(READY) ## the same cases on real GPUs, 2 to 4 ranks, under MPS where they must share one (RANKS, JSON)
	$(PY) tests/gpu/run.py --ranks $(or $(RANKS),2,3,4) $(if $(JSON),--json $(JSON))

bench-gpu: $(READY) ## ranks sharing one GPU under MPS: bench and stress, results in OUT
	$(PY) benchmarks/gpu_session.py $(or $(OUT),bench-gpu)

bench-two-gpus: $(READY) ## one rank a GPU: comparison with NCCL and NVSHMEM, stress, negative controls; results in OUT
	$(PY) benchmarks/gpu_session.py $(or $(OUT),bench-two-gpus) --plan two-gpus

bench-call-path: $(READY) ## host time of a call from Python
	$(PY) -m lamport_numba bench --sizes 16 --mode eager

bench-emulator: $(READY) ## gathers a second of the emulated device, N=4 ranks
	$(MPIRUN) -n $(N) $(PY) benchmarks/emulator_speed.py --json docs/data/emulator-immediate.json
	$(MPIRUN) -n $(N) $(PY) benchmarks/emulator_speed.py --fabric adversarial --json docs/data/emulator-adversarial.json
	$(PY) benchmarks/tables.py

bench-tables: $(READY) ## the tables of docs/performance.md, from docs/data and the session in OUT (as PREFIX)
	$(PY) benchmarks/tables.py $(if $(OUT),--take $(OUT)/session.json $(PREFIX))

test-gpu-faults: $(READY) ## faults on real GPUs, ranks sharing one under MPS; run it last, for it kills ranks
	$(PY) tests/gpu/faults.py --ranks $(or $(RANKS),2,4) $(if $(JSON),--json $(JSON))

lint: $(READY) ## ruff, and mypy --strict on the package
	$(PY) -m ruff check .
	$(PY) -m mypy

verify: $(READY) ## search the model of the protocol over every interleaving (minutes), check docs/verification.md
	$(PY) -m verification --check
	PYTHONPATH=tests:$(PYTHONPATH) $(PY) -m helpers.controls --check

clean: ## remove the virtual environment and what tools left behind
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.PHONY: help demo test test-setup test-faults soak test-gpu test-gpu-faults lint verify clean
.PHONY: bench-gpu bench-two-gpus bench-call-path bench-emulator bench-tables
