# make serve       a local cluster with the default model, in the foreground (Ctrl-C ends it)
# make test        the suite; make test-slow adds what takes minutes; make check is lint and types

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.installed

.PHONY: install serve test test-slow check format clean

install: $(READY)

$(READY): pyproject.toml constraints.txt
	@echo "installing into .venv: minutes, the first time"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[bench,gguf,mooncake,ray,ucx,test]'
	@touch $@

serve: $(READY)
	@exec $(BIN)/pdactors launch $(FILE)

test: $(READY)
	$(BIN)/python -m pytest

test-slow: $(READY)
	$(BIN)/python -m pytest -m slow --timeout 1800

check: $(READY)
	$(BIN)/ruff format --check pdactors tests benchmarks examples
	$(BIN)/ruff check pdactors tests benchmarks examples
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff format pdactors tests benchmarks examples
	$(BIN)/ruff check --fix pdactors tests benchmarks examples

clean:
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
