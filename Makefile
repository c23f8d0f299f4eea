PYTHON ?= python3
BIN := .venv/bin
# Where this is set, as in many containers, every process would compile PyTorch's modules again, for 2 to 10 seconds.
export PYTHONDONTWRITEBYTECODE =

BENCHMARKS := $(addprefix bench-,engines eval filters ingest losses scale search serve stores train)

.PHONY: demo test installed lint links unit $(BENCHMARKS) faults reproduce soak clean

demo: .venv/installed
	$(BIN)/hashseek demo $(ARGS)

# Both at once, because mypy uses one core.
test: installed
	$(MAKE) -j2 lint unit

# Both at once, because pip uses one core.
installed:
	$(MAKE) -j2 .venv/installed-test .venv-milvus/installed

lint: .venv/installed-test links
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	PYTHONPATH=build/links $(BIN)/lint-imports
	if [ -x $(BIN)/hadolint ]; then $(BIN)/hadolint Dockerfile; else echo "hadolint is not available for this platform: Dockerfile not linted"; fi

# One more worker than there are cores, because some tests wait for servers. A worker needs up to 3 GB.
WORKERS = import os; print(max(1, min(os.cpu_count() + 1, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 3_000_000_000)))

unit: installed
	$(BIN)/pytest -n $$($(BIN)/python -c '$(WORKERS)') --dist loadgroup $(ARGS)

$(BENCHMARKS): bench-%: .venv/installed-test
	$(BIN)/python bench/$*.py $(ARGS)

faults soak: .venv/installed-test
	$(BIN)/python bench/$@.py $(ARGS)

# Reproduce the published comparisons (about a day). After an interruption, run it again to continue.
reproduce: .venv/installed-test
	$(BIN)/python -m experiments hbl-table-2
	for data in mirflickr mirflickr-second mirflickr-squeezenet mirflickr-squeezenet-second scene yeast; do \
		$(BIN)/python -m experiments losses --data $$data || exit 1; done
	for data in mirflickr mirflickr-second mirflickr-squeezenet mirflickr-squeezenet-second; do \
		$(BIN)/python -m experiments losses --data $$data --trials 24 --out runs/$$data-24-trials \
			--method tie_aware --method tie_aware_pairs --method dpsh --method dhn --method hashnet || exit 1; done
	$(BIN)/python -m experiments hyp2-tables
	$(BIN)/python -m experiments finetuned

# Link the folders under their import names, for tools that read files (mypy and import-linter).
links:
	rm -rf build/links
	mkdir -p build/links/hashseek/api
	ln -s $(addprefix $(CURDIR)/,indexing retrieval training $(wildcard api/python/*)) build/links/hashseek/
	ln -s $(addprefix $(CURDIR)/,$(filter-out api/python,$(wildcard api/*))) build/links/hashseek/api/

# --no-compile, because compiling 18,000 files, of which a fraction is ever imported, takes a third of the time.
define install
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --no-compile --editable '$(1)' || { \
		df -h . "$${TMPDIR:-/tmp}" >&2; \
		echo "Installation failed: see above. It needs 8 GB here and temporarily 4 GB in $${TMPDIR:-/tmp} (set TMPDIR=FOLDER to use another folder)." >&2; \
		exit 1; }
endef

.venv/installed: pyproject.toml
	$(call install,.)
	touch $@

.venv/installed-test: pyproject.toml
	$(call install,.[test])
	touch $@ .venv/installed

# A Milvus server for tests. Its command needs a module that was removed from later versions of setuptools.
.venv-milvus/installed:
	$(PYTHON) -m venv .venv-milvus
	.venv-milvus/bin/pip install --quiet --no-compile 'setuptools<81' milvus==2.3.5 || echo "no Milvus server for this platform: its tests are skipped"
	touch $@

clean:
	rm -rf .venv .venv-milvus .demo build *.egg-info
