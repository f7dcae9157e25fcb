# Every target does its own set-up; from the second time on, that takes no network and no time.

PYTHON ?= python3
# For a machine without GPU, spare the download of CUDA:
#   make run TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=

TORCH := torch==2.13.0
JUPYTERLAB := jupyterlab==4.6.6

VENV := .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
HAS_TORCH := import torch; assert tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 9)

# Notebooks run in .venv, whatever other kernels are registered on this machine.
export JUPYTER_PREFER_ENV_PATH := 1
unexport JUPYTER_PATH
# No line of C++ for memory of a GPU that ran out where a recipe goes on with less.
export TORCH_CPP_LOG_LEVEL ?= ERROR

.DEFAULT_GOAL := help
.PHONY: help run test check survey lint lab notebooks texts gpu address clean

help:  ## Show this list
	@awk -F ':.*  ## ' '/^[a-z]+:.*  ## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

run: $(READY)  ## Execute a notebook and print what it measures: NB=01 (default), 02, ..., all
	@$(PY) notebooks/execute.py run $(or $(NB),01)

# Two tests at a time, each with one thread: more threads than cores wait for each other.
test check survey: export RECIPES_FAST := 1
test check survey: export OMP_NUM_THREADS := 1
PYTEST := $(PY) -m pytest -n 2 --dist loadfile --no-loadscope-reorder
# ARGS=tests/test_readme.py runs that file in place of all; ARGS=-x is an option for all of them.
NAMED := $(wildcard $(foreach word,$(ARGS),$(firstword $(subst ::, ,$(word)))))
# Notebooks first: they take longest, and no worker should end with one.
test: lint  ## Lint, every recipe against its reference, every notebook in small sizes
	$(PYTEST) --nbmake --nbmake-timeout=900 $(if $(NAMED),,-m "not survey" notebooks tests) $(ARGS)

# The rules of the house, the probe, and two rooms of techniques beside their references.
CHECKED := tests/test_architecture.py tests/test_public_names.py tests/core/model tests/fine_tuning \
	tests/memory
check: lint  ## Lint and the one-minute core of the tests, for while you work
	$(PYTEST) -m "not survey" $(if $(NAMED),,$(CHECKED)) $(ARGS)

survey: $(READY)  ## What takes long, weekly: every technique on every family of models (docs/families.md)
	FAMILIES=all $(PYTEST) -m survey tests $(ARGS)

lint: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

# Progress bars without ipywidgets are text bars: the warning about it says no more.
lab: export PYTHONWARNINGS := ignore:IProgress not found
lab: $(VENV)/.lab  ## Open copies of the notebooks in JupyterLab: lab/ is yours: a copy is made once, and stays
	@mkdir -p lab
	@for each in notebooks/*.ipynb; do \
	    if [ ! -e "lab/$${each##*/}" ]; then cp "$$each" lab/; fi; done
	$(PY) -m jupyterlab --ServerApp.root_dir=. --LabApp.default_url=/lab/tree/lab $(ARGS)

notebooks: $(READY)  ## Rebuild notebooks/*.ipynb from notebooks/source, with outputs; NB=02 for one
	@$(PY) notebooks/execute.py build $(or $(NB),all)

texts: $(READY)  ## Write recorded numbers, pictures and the file map into README, cheatsheet and docs/
	@$(PY) -m tools.file_map
	@$(PY) -m benchmarks.render

gpu: $(READY)  ## Measure the recipes on this machine's GPU: TIER=cpu, gpu16, gpu24 or gpu80 sets the sizes
	@$(PY) -m benchmarks.gpu $(if $(TIER),--tier $(TIER)) $(ARGS)

ADDRESS = $(shell sed -n 's|^Repository = "https://github.com/\(.*\)"|\1|p' pyproject.toml)
address:  ## Write the repository's new address wherever the old one stands: REPO=owner/name
	@test -n "$(REPO)" || { echo "Name it: make address REPO=owner/name"; exit 1; }
	@git grep -lz "$(ADDRESS)" | xargs -0 perl -pi -e 's|\Q$(ADDRESS)\E(?![\w-])|$(REPO)|g'
	@git diff --stat

clean:  ## Remove the environment and all caches; runs/ and lab/ stay
	rm -rf $(VENV) .pytest_cache .ruff_cache build *.egg-info
	find . -name .git -prune -o -name __pycache__ -prune -exec rm -rf {} +

# The stamp comes last, so an interrupted set-up has none and is taken up again next time.
$(READY): requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "Python 3.11 or newer is needed. Name one with: make PYTHON=python3.12 ..."; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || { \
	    echo "This Python cannot make virtual environments. On Debian or Ubuntu: apt install python3-venv"; exit 1; }
	@echo "Setting up $(VENV) (once, a few minutes)"
	@$(PY) -m pip --version >/dev/null 2>&1 || { \
	    reuse=; if $(PYTHON) -c '$(HAS_TORCH)' 2>/dev/null; then reuse=--system-site-packages; fi; \
	    $(PYTHON) -m venv --clear $$reuse $(VENV); }
	@$(PY) -c '$(HAS_TORCH)' 2>/dev/null || \
	    $(PY) -m pip install $(TORCH) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	@$(PY) -m pip install --quiet -r requirements.txt
	@$(PY) -m pip install --quiet --no-deps --editable .
	@touch $@

$(VENV)/.lab: $(READY)
	@$(PY) -m pip install --quiet $(JUPYTERLAB)
	@touch $@
