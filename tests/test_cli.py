"""The command line: flags, variables, errors in one line, exit codes, and `ft serve` as a process (case B62)."""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import requests
from serving import write_vocab

from freetoken import __version__
from freetoken.cli import flags
from freetoken.cli.main import main
from freetoken.cli.parser import Parser
from freetoken.cli.serve import add_arguments, ftype_name
from freetoken.errors import OptionError
from freetoken.options import EngineOptions, ServerOptions
from freetoken.request import SamplingParams

TESTS = Path(__file__).resolve().parent
ALL = (*flags.MODEL, *flags.ENGINE, *flags.SAMPLING, *flags.SERVER)


@pytest.fixture(autouse=True)
def _own_logging() -> Iterator[None]:
    """Commands set up logging for the whole process; take that back."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def parse(*argv: str, **environ: str) -> argparse.Namespace:
    """`ft serve`'s flags."""
    parser = Parser("ft serve", "serve")
    add_arguments(parser)
    return parser.parse(argv, environ)


def test_names_are_unique() -> None:
    names = [name for flag in ALL for name in (*flag.names, *flag.negatives)]
    assert len(names) == len(set(names))


def test_without_flags_every_default_stands() -> None:
    args = parse("-m", "x.gguf")
    assert flags.engine_options(args) == EngineOptions()
    assert flags.server_options(args) == ServerOptions()
    assert flags.sampling_params(args) == SamplingParams()
    model = flags.model_options(args)
    assert (model.path, model.alias, model.chat_template) == (Path("x.gguf"), None, None)


ENGINE = [
    (["-c", "4096"], "n_ctx", 4096),
    (["--ctx-size", "0"], "n_ctx", 0),
    (["--ctx_size", "7"], "n_ctx", 7),
    (["-b", "64"], "n_batch", 64),
    (["-ub", "32"], "n_ubatch", 32),
    (["-b", "64"], "n_chunk", 64),
    (["-b", "64", "-ub", "32"], "n_chunk", 32),
    (["-t", "2"], "n_threads", 2),
    (["-t", "-1"], "n_threads", 0),
    (["-tb", "3"], "n_threads_batch", 3),
    (["-np", "4"], "n_parallel", 4),
    (["-np", "-1"], "n_parallel", 0),
    (["-ngl", "0"], "n_gpu_layers", 0),
    (["-ngl", "99"], "n_gpu_layers", 99),
    (["-ngl", "auto"], "n_gpu_layers", -1),
    (["--n-gpu-layers", "all"], "n_gpu_layers", -2),
    (["-ctk", "f32"], "cache_type_k", "f32"),
    (["-ctv", "f16"], "cache_type_v", "f16"),
    (["--cpu-planes", "1"], "n_planes", 1),
    (["--numa", "distribute"], "numa", "distribute"),
    (["-c", "1", "-c", "2"], "n_ctx", 2),
]


@pytest.mark.parametrize(("argv", "name", "value"), ENGINE, ids=[" ".join(case[0]) for case in ENGINE])
def test_engine_flags(argv: list[str], name: str, value: object) -> None:
    assert getattr(flags.engine_options(parse(*argv)), name) == value


SAMPLING = [
    (["-n", "-1"], "n_predict", -1),
    (["--predict", "5"], "n_predict", 5),
    (["--n-predict", "5"], "n_predict", 5),
    (["-s", "42"], "seed", 42),
    (["--temp", "0.5"], "temperature", 0.5),
    (["--temperature", "-3"], "temperature", 0.0),
    (["--top-k", "7"], "top_k", 7),
    (["--top-p", "0.5"], "top_p", 0.5),
    (["--min-p", "0.1"], "min_p", 0.1),
    (["--typical", "0.9"], "typical_p", 0.9),
    (["--top-nsigma", "1.5"], "top_n_sigma", 1.5),
    (["--repeat-penalty", "1.1"], "repeat_penalty", 1.1),
    (["--repeat-last-n", "32"], "repeat_last_n", 32),
    (["--presence-penalty", "-0.5"], "presence_penalty", -0.5),
    (["--frequency-penalty", "0.5"], "frequency_penalty", 0.5),
    (["--dry-multiplier", "0.8"], "dry_multiplier", 0.8),
    (["--dry-base", "2"], "dry_base", 2.0),
    (["--dry-allowed-length", "3"], "dry_allowed_length", 3),
    (["--dry-penalty-last-n", "9"], "dry_penalty_last_n", 9),
    (["--dry-sequence-breaker", "none"], "dry_sequence_breakers", ()),
    (["--dry-sequence-breaker", "\\n", "--dry-sequence-breaker", "x"], "dry_sequence_breakers", ("\n", "x")),
    (["--xtc-probability", "0.5"], "xtc_probability", 0.5),
    (["--xtc-threshold", "0.2"], "xtc_threshold", 0.2),
    (["--dynatemp-range", "0.3"], "dynatemp_range", 0.3),
    (["--dynatemp-exp", "1.2"], "dynatemp_exponent", 1.2),
    (["--mirostat", "2"], "mirostat", 2),
    (["--mirostat-lr", "0.2"], "mirostat_eta", 0.2),
    (["--mirostat-ent", "4"], "mirostat_tau", 4.0),
    (["--samplers", "top_k;temp"], "samplers", ("top_k", "temperature")),
    (["--sampler-seq", "kt"], "samplers", ("top_k", "temperature")),
    (["--ignore-eos"], "ignore_eos", True),
    (["-s", "7"], "seed", 7),
    (["-n", "3"], "n_predict", 3),
]


@pytest.mark.parametrize(("argv", "name", "value"), SAMPLING, ids=[" ".join(case[0]) for case in SAMPLING])
def test_sampling_flags(argv: list[str], name: str, value: object) -> None:
    assert getattr(flags.sampling_params(parse(*argv)), name) == value
    assert flags.server_options(parse(*argv)).default_sampling == {name: value}


def test_seeds_that_ask_for_one() -> None:
    for text in ("-1", str(2**32 - 1)):
        assert flags.sampling_params(parse("-s", text)).seed is None


SERVER = [
    (["--host", "0.0.0.0"], "host", "0.0.0.0"),
    (["--port", "0"], "port", 0),
    (["--api-key", "a,b", "--api-key", "c"], "api_keys", ("a", "b", "c")),
    (["-to", "5"], "timeout_s", 5),
    (["--threads-http", "9"], "n_threads_http", 9),
    (["--threads-http", "-1"], "n_threads_http", 0),
    (["--no-cache-prompt"], "cache_prompt", False),
    (["--no-cache-prompt", "--cache-prompt"], "cache_prompt", True),
    (["--no-slots"], "is_slots_endpoint_on", False),
    (["--chat-template-kwargs", '{"enable_thinking": false}'], "chat_template_kwargs", {"enable_thinking": False}),
]


@pytest.mark.parametrize(("argv", "name", "value"), SERVER, ids=[" ".join(case[0]) for case in SERVER])
def test_server_flags(argv: list[str], name: str, value: object) -> None:
    assert getattr(flags.server_options(parse(*argv)), name) == value


def test_files_that_flags_name(tmp_path: Path) -> None:
    keys, template = tmp_path / "keys", tmp_path / "template"
    keys.write_text("# comment\none\n\ntwo\n")
    template.write_text("{{ messages }}")
    args = parse("-m", "x", "--api-key", "zero", "--api-key-file", str(keys), "--chat-template-file", str(template))
    assert flags.server_options(args).api_keys == ("zero", "one", "two")
    assert flags.model_options(args).chat_template == "{{ messages }}"


OURS = {"--cpu-planes", "FREETOKEN_ARG_CPU_PLANES"}


@pytest.mark.weights
def test_b62_names_and_variables_are_llama_servers(llama_cpp_source: Path) -> None:
    text = (llama_cpp_source / "tools" / "server" / "README.md").read_text()
    rows = re.findall(r"^\| `(-[^`]+)` \| (.*) \|$", text, re.M)
    by_name = {name: (names, help_) for names, help_ in rows for name in re.findall(r"(?<![\w-])-[-\w]+", names)}
    for flag in ALL:
        if flag.names[0] in OURS:
            continue
        for name in (*flag.names, *flag.negatives):
            names, help_ = by_name[name]
            assert flag.names[0] in names, f"{name} belongs to another flag"
            variable = re.search(r"\(env: (\w+)\)", help_)
            assert flag.env == (variable.group(1) if variable else None), name
        takes_value = bool(re.search(r" [A-Z<{]", by_name[flag.names[0]][0]))
        assert takes_value == (flag.convert is not None), flag.names


def test_b62_switches_never_take_the_next_argument() -> None:
    switches = [(flag.dest, name) for flag in ALL if flag.convert is None for name in (*flag.names, *flag.negatives)]
    assert len(switches) > 8
    for dest, name in switches:
        args = parse(name, "-c", "5")
        assert args.n_ctx == 5 and getattr(args, dest) is not None, name
        with pytest.raises(OptionError):
            parse(name, "true")


def test_b62_values_may_look_like_flags() -> None:
    assert flags.model_options(parse("-m", "-c")).path == Path("-c")
    assert parse("-a", "--port", "--port", "1").alias == "--port"
    assert flags.model_options(parse("-m", "x", "--chat-template", "-{{ 1 }}")).chat_template == "-{{ 1 }}"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--ctx-sizes", "5"], ["--ctx-sizes", "did you mean --ctx-size?"]),
        (["--n-cpu-moe-draft", "5"], ["unknown flag --n-cpu-moe-draft"]),
        (["-x"], ["unknown flag -x"]),
        (["-c5"], ["unknown flag -c5"]),
        (["-np4"], ["unknown flag -np4"]),
        (["--ctx", "5"], ["unknown flag --ctx"]),
        (["--ctx-size=5"], ["--ctx-size=5", "--ctx-size VALUE"]),
        (["--jinja=1"], ["--jinja=1"]),
        (["-c"], ["-c", "expected a value"]),
        (["-c", "many"], ["-c/--ctx-size", "'many' is no whole number"]),
        (["-c", "-5"], ["-5 does not lie between 0"]),
        (["-c", "1e3"], ["'1e3'"]),
        (["-c", "99999999999"], ["99999999999"]),
        (["-b", "0"], ["-b/--batch-size"]),
        (["--port", "70000"], ["--port", "70000"]),
        (["-ngl", "some"], ["-ngl", "'some'"]),
        (["-ctk", "q8_0"], ["-ctk", "q8_0", "f16 or f32"]),
        (["--temp", "hot"], ["--temp", "'hot' is no number"]),
        (["--temp", "nan"], ["--temp"]),
        (["--top-p", "inf"], ["--top-p"]),
        (["--repeat-penalty", "0"], ["--repeat-penalty", "above 0"]),
        (["--mirostat", "3"], ["--mirostat"]),
        (["--cpu-planes", "3"], ["--cpu-planes"]),
        (["--numa", "spread"], ["--numa", "distribute, isolate, numactl"]),
        (["--chat-template-kwargs", "[1]"], ["--chat-template-kwargs", "JSON object"]),
        (["file.gguf"], ["file.gguf"]),
        (["-m", ""], ["-m/--model", "empty"]),
        (["--log-file", ""], ["--log-file", "empty"]),
    ],
    ids=" ".join,
)
def test_bad_command_lines_are_named(argv: list[str], words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "-m", "x.gguf", *argv]) == 2
    error = capsys.readouterr().err
    assert error.startswith("ft: error: ") and error.count("\n") == 1
    for word in words:
        assert word in error


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (["-m", "x", "--api-key-file", "/no/such/file"], "/no/such/file"),
        (["-m", "x", "--chat-template-file", "/no/such/file"], "/no/such/file"),
        (["-m", "x", "--ssl-key-file", "/no/such/file"], "--ssl-cert-file"),
        (["-m", "x", "--log-file", "/no/such/dir/file"], "/no/such/dir/file"),
    ],
)
def test_combinations_that_cannot_work(argv: list[str], word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", *argv]) == 2
    assert word in capsys.readouterr().err


def test_the_environment_gives_values_and_the_line_wins() -> None:
    environ = {
        "LLAMA_ARG_CTX_SIZE": "64",
        "LLAMA_ARG_MODEL": "m.gguf",
        "LLAMA_API_KEY": "k1,k2",
        "LLAMA_ARG_CACHE_PROMPT": "off",
        "LLAMA_ARG_N_PARALLEL": "3",
        "LLAMA_ARG_PORT": "9000",
        "LLAMA_ARG_TEMPERATURE": "0.25",
        "LLAMA_ARG_N_GPU_LAYERS": "auto",
    }
    args = parse(**environ)
    assert flags.model_options(args).path == Path("m.gguf")
    assert flags.engine_options(args).n_ctx == 64 and flags.engine_options(args).n_parallel == 3
    options = flags.server_options(args)
    assert options.api_keys == ("k1", "k2") and options.cache_prompt is False and options.port == 9000
    assert options.default_sampling == {"temperature": 0.25}
    args = parse("-c", "32", "--api-key", "k3", "--cache-prompt", **environ)
    assert flags.engine_options(args).n_ctx == 32
    assert flags.server_options(args).api_keys == ("k1", "k2", "k3")
    assert flags.server_options(args).cache_prompt is True
    assert flags.server_options(parse(LLAMA_ARG_NO_CACHE_PROMPT="1")).cache_prompt is False


@pytest.mark.parametrize(
    ("name", "value"),
    [("LLAMA_ARG_CTX_SIZE", "big"), ("LLAMA_ARG_CACHE_PROMPT", "maybe"), ("LLAMA_ARG_CACHE_TYPE_K", "q4_0")],
)
def test_bad_variables_are_named(name: str, value: str) -> None:
    with pytest.raises(OptionError, match=name):
        parse(**{name: value})


def test_flags_without_effect_say_so(caplog: pytest.LogCaptureFixture) -> None:
    flags.model_options(parse("-m", "x", "--no-jinja"))
    flags.server_options(parse("--webui"))
    assert "--no-jinja has no effect" in caplog.text and "--ui has no effect" in caplog.text
    caplog.clear()
    flags.model_options(parse("-m", "x", "--jinja"))
    flags.server_options(parse("--no-webui"))
    assert not caplog.records


def test_other_commands_leave_flags_out() -> None:
    parser = Parser("ft bench", "bench")
    flags.add_model_flags(parser)
    flags.add_engine_flags(parser, without=("-n", "-c"))
    parser.add_argument("-n", "--n-gen", type=int, default=128)
    args = parser.parse(["-n", "5", "-m", "x"], {})
    assert args.n_gen == 5 and flags.engine_options(args) == EngineOptions()
    with pytest.raises(OptionError, match="unknown flag -c"):
        parser.parse(["-c", "5"], {})


@pytest.mark.parametrize("file_type", [(0, "all F32"), (1, "F16"), (3, "Q4_1"), (15, "Q4_K - Medium"), (999, "")])
def test_names_of_file_types(file_type: tuple[int, str]) -> None:
    assert ftype_name(file_type[0]) == file_type[1]


@pytest.mark.parametrize("argv", [[], ["-h"], ["--help"]])
def test_help(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    assert re.findall(r"^  (\w+(?: kernels)?)  ", capsys.readouterr().out, re.M) == [
        *("serve", "run", "bench", "bench kernels", "info", "plan", "convert", "ctl")
    ]


@pytest.mark.parametrize("argv", [["--version"], ["serve", "--version"]])
def test_version(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    assert capsys.readouterr().out == f"version: {__version__}\n"


def test_help_of_serve_shows_every_flag_and_variable(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--help"]) == 0
    text = capsys.readouterr().out
    for flag in ALL:
        for name in (*flag.names, *flag.negatives, *([flag.env] if flag.env else [])):
            assert name in text


@pytest.mark.parametrize(
    ("redirection", "code", "error"),
    [(">/dev/full", 1, "No space left"), (">&-", 0, ""), ("<&-", 0, ""), ("2>&-", 0, "")],
)
def test_standard_streams_that_are_full_or_closed(redirection: str, code: int, error: str) -> None:
    line = f"'{sys.executable}' -m freetoken info --help {redirection}"
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=20)
    assert done.returncode == code
    assert error in done.stderr and done.stderr.count("\n") <= 1


def test_an_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["srve"]) == 2
    assert "unknown command 'srve'" in capsys.readouterr().err


def test_the_list_of_commands_needs_no_heavy_import() -> None:
    code = (
        "import sys, freetoken.cli.main as m; m.main([]);sys.exit(bool({'torch', 'flask', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


# --- `ft serve` as a process, with an engine of the tests' own ---

LAUNCH = """
import sys, time
sys.path.insert(0, {tests!r})
from fake_engine import FakeEngine
from serving import IM_END, says
from freetoken.cli import serve
from freetoken.cli.main import main
from freetoken.errors import EngineError
from freetoken.request import EngineState

def make_engine(model, options, tokenizer):
    time.sleep({delay})
    engine = FakeEngine(says("Hello", ends={ends}), eos=IM_END, is_endless=not {ends}, token_s=0.01, n_ctx=10**6)
    if {fails}:
        engine.state, engine.failure = EngineState.FAILED, EngineError("no memory for the model")
    return engine

serve.make_engine = make_engine
sys.exit(main(sys.argv[1:]))
"""


@contextmanager
def process(*argv: str, delay: float = 0.0, ends: bool = True, fails: bool = False) -> Iterator[subprocess.Popen[str]]:
    """`ft` with a fake engine."""
    code = LAUNCH.format(tests=str(TESTS), delay=delay, ends=ends, fails=fails)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("LLAMA_ARG_")}
    with subprocess.Popen([sys.executable, "-c", code, *argv], stderr=subprocess.PIPE, text=True, env=environ) as child:
        try:
            yield child
        finally:
            child.kill()


def url_of(child: subprocess.Popen[str]) -> str:
    """The address that the log names."""
    assert child.stderr is not None
    for line in child.stderr:
        found = re.search(r"listening on (\S+)", line)
        if found:
            return found.group(1)
    raise AssertionError("it never listened")


def wait_ready(url: str) -> None:
    """Poll until /health answers 200."""
    for _ in range(500):
        if requests.get(url + "/health", timeout=5).status_code == 200:
            return
        time.sleep(0.02)
    raise AssertionError("it never became ready")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_vocab(tmp_path_factory.mktemp("model") / "tiny.gguf"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_serve_opens_its_port_before_it_loads_and_ends_on_a_signal(model: str, number: signal.Signals) -> None:
    with process("serve", "-m", model, "--port", "0", "-a", "me", delay=0.7, ends=False) as child:
        url = url_of(child)
        response = requests.get(url + "/health", timeout=5)
        assert response.status_code == 503 and response.json()["error"]["message"] == "Loading model"
        wait_ready(url)
        assert requests.get(url + "/v1/models", timeout=5).json()["data"][0]["id"] == "me"
        body = {"prompt": "hi", "stream": True}
        with requests.post(url + "/completion", json=body, stream=True, timeout=10) as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith(b"data: ")
            started = time.monotonic()
            child.send_signal(number)
            assert any(b'"stop":true' in line for line in lines), "a running stream is ended, not cut"
        assert child.wait(5) == 0
        assert time.monotonic() - started < 2.5


def test_serve_ends_while_it_loads(model: str) -> None:
    with process("serve", "-m", model, "--port", "0", delay=30) as child:
        url_of(child)
        time.sleep(0.3)
        child.send_signal(signal.SIGTERM)
        assert child.wait(6) == 0


@pytest.mark.parametrize(
    ("name", "content"), [("no-such.gguf", None), ("empty.gguf", b""), ("text.gguf", b"this is no model file at all")]
)
def test_serve_with_a_bad_file(tmp_path: Path, name: str, content: bytes | None) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with process("serve", "-m", str(path), "--port", "0") as child:
        _, error = child.communicate(timeout=20)
        assert child.returncode == 1
        last = error.strip().splitlines()[-1]
        assert last.startswith("ft: error: ") and name in last and "Traceback" not in error


@pytest.mark.parametrize("command", [["serve", "--port", "0"], ["run", "-p", "hi"]], ids=lambda command: command[0])
def test_b50_an_unknown_architecture_is_named_with_the_known_ones(
    model: str, tmp_path: Path, command: list[str]
) -> None:
    path = tmp_path / "new.gguf"
    path.write_bytes(Path(model).read_bytes().replace(b"llama", b"newer"))
    with process(*command, "-m", str(path)) as child:
        _, error = child.communicate(timeout=20)
        assert child.returncode == 1
    last = error.strip().splitlines()[-1]
    assert "architecture 'newer' is not supported, only" in last and "qwen3moe" in last and "Traceback" not in error


def test_serve_with_an_engine_that_fails(model: str) -> None:
    with process("serve", "-m", model, "--port", "0", fails=True) as child:
        _, error = child.communicate(timeout=20)
        assert child.returncode == 1
        assert error.strip().splitlines()[-1] == "ft: error: no memory for the model"


def test_serve_on_a_port_in_use(model: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        with process("serve", "-m", model, "--port", port, delay=30) as child:
            _, error = child.communicate(timeout=20)
        assert child.returncode == 1
        assert (
            error.strip().splitlines()[-1].startswith(f"ft: error: couldn't bind to 127.0.0.1:{port}: the port is in")
        )


def test_serve_logs(model: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with process("serve", "-m", model, "--port", "0", "-v", "--log-file", str(log)) as child:
        url = url_of(child)
        wait_ready(url)
        assert requests.post(url + "/tokenize", data=json.dumps({"content": "x"}), timeout=5).status_code == 200
        child.send_signal(signal.SIGTERM)
        child.wait(5)
    text = log.read_text()
    assert "listening on http://127.0.0.1:" in text and re.search(r"model loaded in \d+\.\d\d s", text)
    assert "POST /tokenize" in text
