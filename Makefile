# make demo | make test | make check | make wheel-check | make results | make docs | make release: each sets up .venv on first use
# and does nothing twice.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
# Threads that wait must not spin: on a busy machine that slows everything down many times.
export OMP_WAIT_POLICY ?= passive

.PHONY: demo test test-slow check wheel-check results docs release clean

$(STAMP): pyproject.toml constraints.txt src/fgai/version.py
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing fgai, PyTorch, PyTorch Geometric and the tools for tests into .venv: about 2 GB, some minutes"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

demo: $(STAMP)
	$(BIN)/fgai demo --force

test: $(STAMP)
	$(BIN)/python -m pytest -m "not slow" -n 2 --dist loadfile --max-worker-restart 0 --durations=20

test-slow: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist loadfile --max-worker-restart 0

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The wheel and the source distribution: built, installed in a fresh environment, and used from there.
wheel-check: $(STAMP)
	$(BIN)/python -m pytest tests/test_wheel.py

# The tables of the pages below anew, from the records in results/ alone.
results: $(STAMP)
	$(BIN)/fgai bench fill README.md docs/results.md docs/results/*.md docs/explainers.md docs/method.md docs/performance.md docs/scale.md docs/threat-model.md

# The site, in build/site: pages of docs/, notebooks with their output, the reference. A warning fails.
docs: $(STAMP)
	$(BIN)/python -m tools.site
	@echo "open it with: $(BIN)/python -m http.server --bind 127.0.0.1 --directory build/site   and http://127.0.0.1:8000"

# The wheel, the source distribution and the records, with their SHA-256, in build/release.
release: $(STAMP)
	rm -rf build/release
	$(BIN)/python -m hatchling build -d build/release
	tar -czf build/release/fgai-records.tar.gz results
	cd build/release && sha256sum * > SHA256SUMS && cat SHA256SUMS

clean:
	rm -rf build .cache .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis
