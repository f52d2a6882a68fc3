# Two commands do everything on a fresh machine that has Python >= 3.10 and pip: `make demo` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: demo test lint format docs bench clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: $(STAMP)  ## tour of three losses: their numbers, and a drawing of loss and gradient over the ratio
	$(BIN)/python examples/tour.py --out out

test: $(STAMP)  ## the whole test suite
	$(BIN)/python -m pytest -n 2

lint: $(STAMP)  ## ruff and mypy --strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(STAMP)  ## write the generated pages (preset table, one page per preset, metrics)
	$(BIN)/python -m docs.generate

bench: $(STAMP)  ## time the loss and GAE on this CPU, checked first; peers are used if importable or under --peers
	$(BIN)/python -m benchmarks.loss --device cpu
	$(BIN)/python -m benchmarks.gae --device cpu

clean:
	rm -rf $(VENV) out build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
