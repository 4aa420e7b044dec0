# `make` alone lists the targets.
.DEFAULT_GOAL := help
.PHONY: help demo test bench million millions fleet verify faults soak check docs setup up down lock clean

ARGS ?=
MINUTES ?= 10
BIN := .venv/bin

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-7s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: ## install everything, evaluate a bundled benchmark end to end, print the report
	@deploy/setup
	@$(BIN)/python examples/demo.py $(ARGS)

# The tests wait more than they compute, so there are more processes than cores; each takes one file after another.
test: ## install everything, run the whole test suite (ARGS="-k pool" adds arguments)
	@deploy/setup docker redis venv image code notebook testing bench
	@$(BIN)/pytest -n 3 --dist loadfile $(ARGS)

bench: ## measure evalpool and its peers in one run (QUICK=1 takes about ten minutes)
	@deploy/setup docker redis venv image code notebook testing bench
	@$(BIN)/python -m bench $(if $(QUICK),--quick) $(ARGS)

million: ## time every query of a running system, in a database with millions of jobs
	@deploy/setup venv testing
	@$(BIN)/python -m bench.million $(ARGS)

millions: ## the same with ten million jobs, in PostgreSQL only; takes half an hour and 20 GB of disk
	@deploy/setup venv testing
	@$(BIN)/python -m bench.million --older 8 --database postgresql $(ARGS)

fleet: ## measure how many jobs a fleet puts through one PostgreSQL, and what idle workers cost (QUICK=1 is shorter)
	@deploy/setup redis venv testing
	@$(BIN)/python -m bench.fleet $(if $(QUICK),--quick) $(ARGS)

verify: ## run every labelled program in DATA=folder, and compare verdicts with labels
	@deploy/setup docker redis venv image code
	@$(BIN)/python tests/verify.py $(or $(DATA),$(error name the folder: make verify DATA=folder)) $(ARGS)

faults: ## break one part at a time, and audit the database after each
	@deploy/setup docker redis venv image testing
	@$(BIN)/pytest tests/faults $(ARGS)

soak: ## break something every few seconds for MINUTES, then audit the database
	@deploy/setup docker redis venv image testing
	@$(BIN)/python tests/soak.py --minutes $(MINUTES) $(ARGS)

check: ## lint, format, types, import rules, documentation
	@deploy/setup venv
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python docs/build.py

docs: ## build the documentation into site/, and check its links
	@deploy/setup venv
	@$(BIN)/python docs/build.py

setup: ## prepare this machine: Docker engine, Redis, .venv, sandbox image
	@deploy/setup

# the plugin if it is installed, otherwise the older separate program
COMPOSE = $$(if docker compose version > /dev/null 2>&1; then echo docker compose; \
	elif command -v docker-compose > /dev/null; then echo docker-compose; fi)
NO_COMPOSE = { echo "Docker Compose is missing. On Debian, as root: apt-get install docker-compose" >&2; exit 1; }

# The passwords of the stack are made once, in a file that only its owner can read. A symbolic link, or a file of another user, is
# refused, since others might read the passwords there.
up: ## start the compose stack
	@if [ -L .env ] || { [ -e .env ] && ! { [ -f .env ] && [ -O .env ]; }; }; then \
		echo ".env must be a regular file that belongs to $$(id -un), not a link: passwords are written to it" >&2; exit 1; fi
	@umask 077; touch .env; chmod 600 .env; [ -z "$$(tail -c 1 .env)" ] || echo >> .env
	@grep -q '^POSTGRES_PASSWORD=.' .env || { word() { od -An -N16 -tx1 /dev/urandom | tr -d ' \n'; }; \
		printf 'POSTGRES_PASSWORD=%s\nFLOWER_PASSWORD=%s\n' "$$(word)" "$$(word)" >> .env; }
	@compose="$(COMPOSE)"; [ -n "$$compose" ] || $(NO_COMPOSE); $$compose up -d --build $(ARGS)

down: ## stop the compose stack
	@compose="$(COMPOSE)"; [ -n "$$compose" ] || $(NO_COMPOSE); $$compose down $(ARGS)

# every dependency, the extras, the development tools and the build backend, for any platform
lock: ## resolve the dependencies into requirements.lock again (ARGS="--upgrade" upgrades all of them)
	@uv=$$(mktemp -d) && trap 'rm -rf "$$uv"' EXIT && python3 -m venv "$$uv" && \
	"$$uv/bin/pip" install --quiet --disable-pip-version-check uv && \
	printf '%s\n' 'hatchling>=1.27' 'editables' | UV_SYSTEM_CERTS=1 "$$uv/bin/uv" pip compile --quiet --universal --python-version 3.11 \
		--extra humaneval --extra parquet --group dev --generate-hashes --no-annotate --no-header --no-emit-index-url --no-emit-find-links \
		--output-file requirements.lock $(ARGS) pyproject.toml - && \
	UV_SYSTEM_CERTS=1 "$$uv/bin/uv" pip compile --quiet --universal --python-version 3.11 --constraint requirements.lock \
		--group bench --generate-hashes --no-annotate --no-header --no-emit-index-url --no-emit-find-links \
		--output-file bench/requirements.lock $(ARGS)

clean: ## remove .venv, caches and builds (Docker, Redis and images stay)
	@rm -rf .venv dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache *.egg-info
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
