# `make demo` and `make test` need Linux, Python >= 3.10 with venv, and make; they set up the rest inside the checkout.

PYTHON ?= python3
TRAIN ?= torch
SECONDS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# $(call install,WHAT,REQUIREMENTS): a line announces what is installed, and a terminal shows the package that pip is at.
install = @echo "Installing $(1) into $(VENV) ..."; begin=$$(date +%s); .ci/progress $(PIP) install $(2) \
	&& echo "  done in $$(($$(date +%s) - begin)) s" && touch $@

# What is made of viewer/, and the same where Node can make it.
PAGE := viewer/dist/index.html
NODE := $(shell command -v npm >/dev/null && node -e 'process.exit(process.versions.node.split(".")[0] < 20 ? 1 : 0)' \
	2>/dev/null && echo $(PAGE))

.DEFAULT_GOAL := help
.PHONY: help demo check test test-all durations lint generate docs viewer screenshots audit bench card soak fuzz scale simulate mutations versions clean
.NOTPARALLEL:

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.demo $(if $(filter torch,$(TRAIN)),$(VENV)/.torch)  ## the whole chain, live; SECONDS=90 ends it, TRAIN=simulated needs no PyTorch
	@$(if $(NODE),$(MAKE) -s $(NODE) || echo "The viewer cannot be built here; the demo goes on without.")
	@$(BIN)/python -m demo --train $(TRAIN) $(if $(SECONDS),--seconds $(SECONDS))

check: $(VENV)/.dev  ## lint, types and pure tests: a minute and a half
	@.ci/tier check

test: $(VENV)/.dev $(NODE)  ## check, and the tests with Prometheus, PyTorch and real processes: at most 8 minutes
	@.ci/tier test

test-all: $(VENV)/.dev $(NODE)  ## every test there is, every mutant and version: before a release, and every night
	@.ci/tier all

durations: $(VENV)/.dev  ## write what each test file took in the last `make test` and `make test-all` to tests/durations.csv
	@$(BIN)/python -m tests.support.durations .cache/reports/*.xml > .cache/durations.csv
	@mv .cache/durations.csv tests/durations.csv

lint: $(VENV)/.dev  ## ruff, import contracts, spelling, words and phrases of docs/style.md, mypy
	@.ci/tier lint

generate: $(VENV)/.dev  ## write the generated files again
	@$(BIN)/python -m alerts helm/files
	@$(BIN)/python -m dashboards helm/files/dashboards
	@$(BIN)/python -m helm.generate
	@$(BIN)/python -m docs.generate

docs: $(VENV)/.docs  ## the documentation as a site in site/, with every link checked
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "open site/index.html"

viewer: $(PAGE)  ## the page of `flopwatch boards`; needs Node 20 or newer

screenshots: $(VENV)/.dev $(PAGE)  ## every dashboard of a simulated cluster as pictures in screenshots/, and the pictures of docs/
	@$(BIN)/python -m demo.screenshots screenshots
	@$(BIN)/python -m demo.pictures docs

card: $(VENV)/.dev  ## check flopwatch on this machine's NVIDIA GPUs: PASS, FAIL or INFO per line, at most 10 minutes, or SECONDS
	@$(BIN)/python -m bench.card $(if $(SECONDS),--seconds $(SECONDS))

bench: $(VENV)/.dev  ## compare flopwatch with its peers
	@for file in $(filter-out bench/soak.py bench/rules.py,$(wildcard bench/*.py)); do echo "$$file"; $(BIN)/python $$file || exit; done

soak: $(VENV)/.dev  ## scrape a simulated node every second for an hour, or SECONDS, and see whether it grows
	@$(BIN)/python bench/soak.py --seconds $(or $(SECONDS),3600)

scale: $(VENV)/.dev  ## every rule over the series of 32,768 GPUs on a real Prometheus: the time of each group and its interval
	@$(BIN)/python bench/rules.py

mutations: $(VENV)/.dev  ## every mutant of every alert
	@FLOPWATCH_MUTANTS=0 $(BIN)/python -m pytest --durations=10 tests/rules/test_alert_mutations.py

versions: $(VENV)/.dev $(NODE)  ## rules, pages, reports and boards on the oldest and newest Prometheus, VictoriaMetrics and Alertmanager: 20 minutes
	@FLOPWATCH_VERSIONS=1 $(BIN)/python -m pytest -rs --durations=10 tests/process/test_versions.py tests/process/test_delivery.py tests/e2e/test_boards.py

simulate: $(VENV)/.dev  ## compare the ledger and the alerts with a simulated truth, 54 days of 16,384 GPUs; SEED=2 for another history
	@$(BIN)/flopwatch simulate --scenario llama3 --seed $(or $(SEED),1)
	@promtool=$$($(BIN)/python -m demo.servers | sed -n 's/^promtool: //p'); for scenario in stragglers hangs parallel; do \
		$(BIN)/flopwatch simulate --scenario $$scenario --seed $(or $(SEED),1) --promtool "$$promtool" || exit; done
	@FLOPWATCH_REHEARSE=1 FLOPWATCH_SEEDS=3 $(BIN)/python -m pytest -s tests/rules/test_incidents.py tests/e2e/test_slow_ranks.py

fuzz: $(VENV)/.dev $(VENV)/.fuzz  ## fuzz every parser of outside input, each for 30 s, or SECONDS
	@for target in kmsg sysfs podresources otlp webconfig; do \
		$(BIN)/python -m tests.fuzz $$target --seconds $(or $(SECONDS),30) || exit; done

audit: $(VENV)/.dev  ## ask the advisories of PyPI and npm about what we depend on
	@.ci/audit

clean:  ## remove everything the other targets made
	rm -rf $(VENV) .cache site demo-state screenshots viewer/node_modules viewer/dist dist build .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(PAGE): $(wildcard viewer/*.json viewer/*.ts viewer/*.html viewer/src/* viewer/src/panels/* viewer/icons/*)
	@echo "Building the viewer of dashboards ..."; begin=$$(date +%s); mkdir -p .cache; \
	.ci/progress sh -c 'cd viewer && npm ci --no-audit --no-fund && npm run build' && touch $(PAGE) \
	&& echo "  done in $$(($$(date +%s) - begin)) s"

# A stamp older than pyproject.toml means that the packages may have changed.
$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "error: flopwatch needs Python 3.10 or newer; \
	this is " + sys.version.split()[0] + ". Choose one: make PYTHON=/path/to/python3.x")'
	@echo "Making the virtual environment $(VENV) with $$($(PYTHON) --version) ..."
	@$(PIP) --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV) >/dev/null 2>&1 \
	|| { $(PYTHON) -m venv --without-pip $(VENV) && $(PYTHON) -m demo.servers --pip $(BIN)/python; }
	@$(PIP) install -q --upgrade 'pip>=25.1'
	@touch $@

$(VENV)/.demo: $(VENV)/.python pyproject.toml
	$(call install,flopwatch and what the demo needs,-e '.[exporter$(,)ledger$(,)report]' --group demo)

$(VENV)/.torch: $(VENV)/.python pyproject.toml
	$(call install,PyTorch (200 MB or more),--group torch)

$(VENV)/.dev: $(VENV)/.demo $(VENV)/.torch
	$(call install,the tools for tests,--group dev --group dashboards)

$(VENV)/.docs: $(VENV)/.python pyproject.toml
	$(call install,MkDocs,--group docs)

# atheris has wheels for some Pythons only; without it the targets say so and are skipped.
$(VENV)/.fuzz: pyproject.toml
	@$(PIP) install -q --only-binary atheris --group fuzz || echo "atheris cannot be installed for this Python"
	@touch $@

, := ,
