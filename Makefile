# The project's commands. They need Python >= 3.11, git and make; what they install goes to .venv, and is installed again
# when pyproject.toml, constraints.txt or the version of Python changes. A new .venv takes the newest supported Python that
# runs here and for which the packages can be installed; later commands keep it. Another: make PYTHON=python3.12 ...
runs = $(shell $(1) -c 'import ensurepip, venv' >/dev/null 2>&1 && echo $(1))
ifndef PYTHON
PYTHON := $(if $(wildcard .venv/.run-*),$(call runs,.venv/bin/python))
PYTHON := $(or $(PYTHON),$(strip $(foreach name,python3.13 python3.12 python3.11,$(call runs,$(name)))),python3)
endif

of_python := import sys; print("%d.%d" % sys.version_info[:2])
version := $(shell $(firstword $(PYTHON)) -c '$(of_python)')
run := .venv/.run-$(version)
dev := .venv/.dev-$(version)
docs := .venv/.docs-$(version)
python := .venv/bin/python

# Packages are compiled as they are first imported, not all when they are installed: that takes 16 s instead of 25 s.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help train test test-full lint docs pictures venv

help:
	@echo "make train      train the demo: a small GPT on Python's own source code, 2 to 3 minutes on two cores"
	@echo "make test       the default tests"
	@echo "make test-full  every test that needs no GPU"
	@echo "make lint       ruff, mypy, the order of imports, and each room's lines against its budget"
	@echo "make docs       the documentation as a site, in build/docs; a dead link is an error"
	@echo "make pictures   the pictures of docs whose inputs changed, drawn again, 10 minutes at most"
	@echo "make venv       only install, with the development tools"

train: $(run)
	$(python) train.py demo
	@echo
	@echo "The curve of the loss: runs/demo/loss.png. Next:"
	@echo "  source .venv/bin/activate"
	@echo "  megajax generate --checkpoint runs/demo --prompt 'def read('"

test: $(dev)
	$(python) -m pytest -n 2 --dist worksteal

test-full: $(dev)
	$(python) -m pytest -n 2 --dist worksteal -m 'not gpu'

lint: $(dev)
	$(python) -m ruff check
	$(python) -m ruff format --check
	$(python) -m mypy
	.venv/bin/lint-imports
	$(python) .ci/lines.py

docs: $(docs)
	$(python) -m sphinx --fail-on-warning --keep-going --quiet -b html docs build/docs

pictures: $(run)
	$(python) docs/pictures/draw.py

venv: $(dev)

$(dev): extra := [dev]
$(docs): extra := [docs]
$(run) $(dev) $(docs): pyproject.toml constraints.txt
	@$(firstword $(PYTHON)) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "$(firstword $(PYTHON)) is not a Python >= 3.11; name another: make PYTHON=python3.13" >&2; exit 1; }
	@for each in $(PYTHON); do \
		version=$$($$each -c '$(of_python)'); \
		$(python) -c "import pip, sys; assert '%d.%d' % sys.version_info[:2] == '$$version'" 2>/dev/null \
			|| $$each -m venv --clear .venv || continue; \
		echo "Installing megajax$(extra) for Python $$version into .venv"; \
		$(python) -m pip install -q --no-compile -e '.$(extra)' -c constraints.txt >.venv/install.log 2>&1 \
			&& touch .venv/.run-$$version $(@:%$(version)=%)$$version && exit 0; \
		grep -E '^ *ERROR' .venv/install.log || tail -n 20 .venv/install.log; \
		echo "Not all packages can be installed for Python $$version"; \
	done; exit 1
