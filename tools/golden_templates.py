"""Makes `tests/golden/chat_templates.json`: what llama.cpp's own Jinja engine prints for its `models/templates`.

    python tools/golden_templates.py LLAMA_CPP_SOURCE

Compiles common/jinja of that source tree (a C++17 compiler, about a minute), renders every template with every chat of
`tests/golden/chat_cases.json`, and stores a hash of each text, since the templates are not ours to copy. Messages are
adapted by `freetoken.chat` before, the dates are those of `CLOCK`; templates that read the clock are left out.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
from datetime import datetime
from pathlib import Path
from typing import Any

from freetoken.chat import ChatTemplate
from freetoken.chat.messages import adapt_messages, read_messages

GOLDEN = Path(__file__).resolve().parent.parent / "tests" / "golden"
CLOCK = datetime(2026, 1, 2, 3, 4, 5)

MAIN = r"""
#include "jinja/runtime.h"
#include "jinja/parser.h"
#include "jinja/lexer.h"
#include "json.h"
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <sstream>
extern "C" void ggml_abort(const char *, int, const char *, ...) { std::abort(); }
static std::string read(const char * path) {
    std::ifstream file(path);
    std::stringstream text;
    text << file.rdbuf();
    return text.str();
}
int main(int, char ** argv) {
    try {
        const std::string source = read(argv[1]);
        jinja::lexer lexer;
        jinja::program program = jinja::parse_from_tokens(lexer.tokenize(source));
        jinja::context context(source);
        jinja::global_from_json(context, common_json::parse(read(argv[2])), true);
        jinja::runtime runtime(context);
        std::cout << jinja::runtime::gather_string_parts(runtime.execute(program))->as_string().str();
        return 0;
    } catch (const std::exception & error) {
        std::cerr << error.what();
        return 1;
    }
}
"""


def build(source: Path, folder: Path) -> Path:
    """The program `render TEMPLATE CONTEXT.json`."""
    (folder / "main.cpp").write_text(MAIN)
    common = source / "common"
    parts = [common / "jinja" / f"{n}.cpp" for n in ("lexer", "parser", "runtime", "value", "string", "caps")]
    includes = [f"-I{p}" for p in (common, source / "vendor", source / "include", source / "ggml" / "include")]
    files = [folder / "main.cpp", common / "json.cpp", common / "unicode.cpp", *parts]
    command = ["g++", "-O1", "-std=c++17", "-w", *includes, *map(str, files), "-o", str(folder / "render")]
    subprocess.run(command, check=True)
    return folder / "render"


def expected(program: Path, template: ChatTemplate, case: dict[str, Any], folder: Path) -> str:
    """A hash of the text, or "refused"."""
    context = {
        "messages": adapt_messages(read_messages(case["messages"]), template.abilities, template.source),
        "bos_token": template.bos,
        "eos_token": template.eos,
        "enable_thinking": True,
        "datetime": CLOCK.strftime("%b %d %Y"),
        "date_string": CLOCK.strftime("%d %b %Y"),
        **case["extra"],
    }
    if case["tools"]:
        context["tools"] = case["tools"]
    if case["add_generation_prompt"]:
        context["add_generation_prompt"] = True
    (folder / "template").write_text(template.source)
    (folder / "context").write_text(json.dumps(context))
    command = [str(program), str(folder / "template"), str(folder / "context")]
    result = subprocess.run(command, capture_output=True, check=False)
    return hashlib.sha256(result.stdout).hexdigest()[:16] if result.returncode == 0 else "refused"


def main() -> None:
    source = Path(sys.argv[1])
    cases = json.loads((GOLDEN / "chat_cases.json").read_text())
    result: dict[str, Any] = {"oracle": "llama.cpp b11434, common/jinja", "templates": {}}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        program = build(source, folder)
        for path in sorted((source / "models" / "templates").glob("*.jinja")):
            if "strftime_now" not in path.read_text():
                template = ChatTemplate(path.read_text(), "<s>", "</s>", clock=lambda: CLOCK)
                result["templates"][path.name] = {c["name"]: expected(program, template, c, folder) for c in cases}
    (GOLDEN / "chat_templates.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
