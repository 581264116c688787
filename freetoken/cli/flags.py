"""The table of flags, spelled as llama-server spells them, with their LLAMA_ARG_* variables.

Parser, environment and help come from it.
Every command adds the groups that it needs. No flag has a default here: a value is None unless it was given, and the
`*_options` functions lay what was given over the defaults of `options` and `request`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
from collections.abc import Iterable
from pathlib import Path

from freetoken.cli.default_model import default_model
from freetoken.cli.flag import FLOAT_MAX, INT_MAX, Flag, add_flags, given, real, whole, words
from freetoken.cli.flags_gpu import GPU, gpu_fields
from freetoken.errors import OptionError
from freetoken.options import NUMA_STRATEGIES, EngineOptions, ModelOptions, ServerOptions
from freetoken.request import SamplingParams
from freetoken.server.sampler_names import samplers_by_letter, samplers_by_name

__all__ = [
    "add_engine_flags",
    "add_model_flags",
    "add_sampling_flags",
    "add_server_flags",
    "engine_options",
    "model_options",
    "sampling_fields",
    "sampling_params",
    "server_options",
    "verbosity",
    "words",
]

log = logging.getLogger(__name__)

_CACHE_TYPES = ("f16", "f32")
_VERBOSE = 9


def count_or_auto(text: str) -> int:
    """A count above 0, or -1 for "decide" (then 0)."""
    return max(int(whole(-1)(text)), 0)


def positive(text: str) -> float:
    """A finite number above 0 whose reciprocal is finite too."""
    value = float(real(0.0)(text))
    if value < 1 / FLOAT_MAX:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def cache_type(text: str) -> str:
    """A type of the KV cache that we have."""
    if text not in _CACHE_TYPES:
        raise argparse.ArgumentTypeError(f"{text!r} is not supported: this server keeps its cache as f16 or f32")
    return text


def numa_strategy(text: str) -> str:
    """A strategy for several memory nodes; empty text is the first one."""
    text = text or NUMA_STRATEGIES[0]
    if text not in NUMA_STRATEGIES:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(NUMA_STRATEGIES)}")
    return text


def seed(text: str) -> int | None:
    """-1 (or its unsigned form) draws a seed; None stands for not given, so it is kept as -1."""
    value = int(whole(-1, 2**32 - 1)(text))
    return -1 if value == 2**32 - 1 else value


def sampler_names(text: str) -> tuple[str, ...]:
    """Names separated by semicolons."""
    return samplers_by_name([name for name in text.split(";") if name])


def json_object(text: str) -> dict[str, object]:
    """A JSON object."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"no JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("expected a JSON object")
    return value


def file(text: str) -> Path:
    """A file's path; empty text, such as a shell variable that is not set, would mean the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("the name is empty, expected a file")
    return Path(text)


MODEL = (
    Flag(
        ("-m", "--model"),
        "model",
        "the GGUF file, any shard of a split one (default: the small model shipped with FreeToken)",
        file,
        "FNAME",
        "LLAMA_ARG_MODEL",
    ),
    Flag(("-v", "--verbose", "--log-verbose"), "verbose", "log everything"),
    Flag(
        ("-lv", "--verbosity", "--log-verbosity"),
        "verbosity",
        "log level: 1 errors, 2 warnings, 3 information (what a server logs), 4 and 5 everything",
        whole(0),
        env="LLAMA_ARG_LOG_VERBOSITY",
    ),
    Flag(("--log-file",), "log_file", "log to a file too", file, "FNAME", "LLAMA_ARG_LOG_FILE"),
    Flag(
        ("--chat-template",),
        "chat_template",
        "chat template: Jinja source, or a built-in's name (default: the file's)",
        str,
        "JINJA_TEMPLATE",
        "LLAMA_ARG_CHAT_TEMPLATE",
    ),
    Flag(
        ("--chat-template-file",),
        "chat_template_file",
        "file with the chat template",
        file,
        "FNAME",
        "LLAMA_ARG_CHAT_TEMPLATE_FILE",
    ),
    Flag(
        ("--jinja",), "jinja", "accepted: templates are always Jinja", env="LLAMA_ARG_JINJA", negatives=("--no-jinja",)
    ),
)

ENGINE = (
    Flag(("-c", "--ctx-size"), "n_ctx", "context of all slots, 0 takes the model's", whole(), env="LLAMA_ARG_CTX_SIZE"),
    Flag(("-b", "--batch-size"), "n_batch", "a limit of -ub, one prefill chunk", whole(1), env="LLAMA_ARG_BATCH"),
    Flag(("-ub", "--ubatch-size"), "n_ubatch", "tokens of one prefill chunk", whole(1), env="LLAMA_ARG_UBATCH"),
    Flag(("-t", "--threads"), "n_threads", "threads of generation, -1 decides", count_or_auto, env="LLAMA_ARG_THREADS"),
    Flag(("-tb", "--threads-batch"), "n_threads_batch", "threads of prefill (default: as -t)", count_or_auto),
    Flag(
        ("--numa",),
        "numa",
        "of several memory nodes: distribute threads and memory over all, isolate to this one, or numactl's CPUs",
        numa_strategy,
        "TYPE",
        "LLAMA_ARG_NUMA",
    ),
    Flag(
        ("-ctk", "--cache-type-k"),
        "cache_type_k",
        "type of cached keys: f16, f32",
        cache_type,
        "TYPE",
        "LLAMA_ARG_CACHE_TYPE_K",
    ),
    Flag(
        ("-ctv", "--cache-type-v"),
        "cache_type_v",
        "type of cached values: f16, f32",
        cache_type,
        "TYPE",
        "LLAMA_ARG_CACHE_TYPE_V",
    ),
    Flag(
        ("--cpu-planes",),
        "n_planes",
        "int8 planes of an activation: 2 (16 bits, default) or 1 (8 bits: faster on slow processors, less exact)",
        whole(1, 2),
        env="FREETOKEN_ARG_CPU_PLANES",
    ),
)

SAMPLING = (
    Flag(
        ("-n", "--predict", "--n-predict"),
        "n_predict",
        "tokens to generate, -1 until the context is full",
        whole(-1),
        env="LLAMA_ARG_N_PREDICT",
    ),
    Flag(("-s", "--seed"), "seed", "seed, -1 draws one", seed, "SEED"),
    Flag(("--samplers",), "samplers", "samplers in order, separated by ';'", sampler_names, "SAMPLERS"),
    Flag(("--sampler-seq", "--sampling-seq"), "samplers", "the same, one letter each", samplers_by_letter, "SEQUENCE"),
    Flag(("--ignore-eos",), "ignore_eos", "never end at an end-of-generation token"),
    Flag(("--temp", "--temperature"), "temperature", "temperature, 0 is greedy", real(), env="LLAMA_ARG_TEMPERATURE"),
    Flag(("--top-k",), "top_k", "keep the K likeliest tokens, 0 keeps all", whole(-INT_MAX), env="LLAMA_ARG_TOP_K"),
    Flag(("--top-p",), "top_p", "keep the likeliest tokens of this total probability", real(), env="LLAMA_ARG_TOP_P"),
    Flag(("--min-p",), "min_p", "keep tokens of at least this share of the likeliest", real(), env="LLAMA_ARG_MIN_P"),
    Flag(
        ("--top-nsigma", "--top-n-sigma"), "top_n_sigma", "keep logits within n standard deviations, -1 is off", real()
    ),
    Flag(("--xtc-probability",), "xtc_probability", "chance of XTC, 0 is off", real()),
    Flag(("--xtc-threshold",), "xtc_threshold", "threshold of XTC, above 0.5 is off", real()),
    Flag(("--typical", "--typical-p"), "typical_p", "locally typical sampling, 1 is off", real()),
    Flag(("--repeat-last-n",), "repeat_last_n", "tokens looked at for repeats, 0 is off", whole()),
    Flag(
        ("--repeat-penalty",),
        "repeat_penalty",
        "penalty of repeats, 1 is off",
        positive,
        env="LLAMA_ARG_REPEAT_PENALTY",
    ),
    Flag(("--presence-penalty",), "presence_penalty", "penalty of presence", real(), env="LLAMA_ARG_PRESENCE_PENALTY"),
    Flag(
        ("--frequency-penalty",), "frequency_penalty", "penalty of frequency", real(), env="LLAMA_ARG_FREQUENCY_PENALTY"
    ),
    Flag(("--dry-multiplier",), "dry_multiplier", "strength of DRY, 0 is off", real()),
    Flag(("--dry-base",), "dry_base", "base of DRY", real(1.0)),
    Flag(("--dry-allowed-length",), "dry_allowed_length", "length of repeats that DRY allows", whole()),
    Flag(("--dry-penalty-last-n",), "dry_penalty_last_n", "tokens that DRY looks at, 0 is off", whole()),
    Flag(
        ("--dry-sequence-breaker",),
        "dry_sequence_breakers",
        "text that breaks a repeat for DRY (may be repeated; 'none' for none)",
        str,
        "STRING",
        is_list=True,
    ),
    Flag(("--dynatemp-range",), "dynatemp_range", "range of dynamic temperature, 0 is off", real()),
    Flag(("--dynatemp-exp",), "dynatemp_exponent", "exponent of dynamic temperature", real()),
    Flag(("--mirostat",), "mirostat", "0 off, 1 Mirostat, 2 Mirostat 2.0", whole(0, 2)),
    Flag(("--mirostat-lr",), "mirostat_eta", "Mirostat's learning rate", real()),
    Flag(("--mirostat-ent",), "mirostat_tau", "Mirostat's target entropy", real()),
)

SERVER = (
    Flag(("--host",), "host", "address to listen on, or a path ending in .sock", str, "HOST", "LLAMA_ARG_HOST"),
    Flag(("--port",), "port", "port to listen on, 0 takes a free one", whole(0, 65535), "PORT", "LLAMA_ARG_PORT"),
    Flag(
        ("-a", "--alias"), "alias", "names of the model for clients, comma-separated", str, "STRING", "LLAMA_ARG_ALIAS"
    ),
    Flag(
        ("-np", "--parallel"),
        "n_parallel",
        "requests served at once, -1 decides",
        count_or_auto,
        env="LLAMA_ARG_N_PARALLEL",
    ),
    Flag(
        ("--api-key",),
        "api_key",
        "keys that clients must send, comma-separated",
        words,
        "KEY",
        "LLAMA_API_KEY",
        is_list=True,
    ),
    Flag(("--api-key-file",), "api_key_file", "file with one key a line", file, "FNAME", "LLAMA_ARG_API_KEY_FILE"),
    Flag(("--ssl-key-file",), "ssl_key_file", "PEM file of the TLS key", file, "FNAME", "LLAMA_ARG_SSL_KEY_FILE"),
    Flag(
        ("--ssl-cert-file",),
        "ssl_cert_file",
        "PEM file of the TLS certificate",
        file,
        "FNAME",
        "LLAMA_ARG_SSL_CERT_FILE",
    ),
    Flag(("-to", "--timeout"), "timeout_s", "seconds of one read or write", whole(1), env="LLAMA_ARG_TIMEOUT"),
    Flag(("--threads-http",), "n_threads_http", "HTTP threads kept ready", count_or_auto, env="LLAMA_ARG_THREADS_HTTP"),
    Flag(
        ("--sse-ping-interval",),
        "sse_ping_interval_s",
        "seconds between pings of a silent stream, -1 for none",
        whole(-1),
        env="LLAMA_ARG_SSE_PING_INTERVAL",
    ),
    Flag(
        ("--cache-prompt",),
        "cache_prompt",
        "reuse the common beginning of prompts (default)",
        env="LLAMA_ARG_CACHE_PROMPT",
        negatives=("--no-cache-prompt",),
    ),
    Flag(
        ("--slots",),
        "is_slots_endpoint_on",
        "serve /slots (default)",
        env="LLAMA_ARG_ENDPOINT_SLOTS",
        negatives=("--no-slots",),
    ),
    Flag(
        ("--chat-template-kwargs",),
        "chat_template_kwargs",
        "variables for the chat template, as a JSON object",
        json_object,
        "STRING",
        "LLAMA_ARG_CHAT_TEMPLATE_KWARGS",
    ),
    Flag(
        ("--ui", "--webui"),
        "ui",
        "accepted: there is no web page yet",
        env="LLAMA_ARG_UI",
        negatives=("--no-ui", "--no-webui"),
    ),
)


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Which model, how it reads prompts, and logging."""
    add_flags(parser, "model", MODEL)


def add_engine_flags(parser: argparse.ArgumentParser, without: Iterable[str] = ()) -> None:
    """How the engine runs. `without` names flags that a command does not take."""
    left_out = set(without)
    for title, flags in (("engine", ENGINE), ("GPU", GPU)):
        add_flags(parser, title, [flag for flag in flags if left_out.isdisjoint(flag.names)])


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """The sampler, and how much to generate."""
    add_flags(parser, "sampling", SAMPLING)


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """Where and how to listen."""
    add_flags(parser, "server", SERVER)


def verbosity(args: argparse.Namespace, default: int) -> int:
    """llama-server's log level, `default` where no flag gives one."""
    if getattr(args, "verbose", None):
        return _VERBOSE
    level = getattr(args, "verbosity", None)
    return default if level is None else int(level)


def model_options(args: argparse.Namespace) -> ModelOptions:
    """The shipped model where none is named. Raises OptionError without either, or for an unreadable template file."""
    path = default_model() if args.model is None else args.model
    if path is None:
        raise OptionError("no model is named, and none is installed with this package: give a file with -m FILE")
    if args.jinja is False:
        log.warning("--no-jinja has no effect: chat templates are always Jinja here")
    template = args.chat_template
    if args.chat_template_file is not None:
        template = _text_of(args.chat_template_file, "--chat-template-file")
    return ModelOptions(path=path, alias=getattr(args, "alias", None), chat_template=template)


def engine_options(args: argparse.Namespace) -> EngineOptions:
    """The engine's wishes. Raises OptionError for wishes about the GPU that we cannot fulfil."""
    names = [field.name for field in dataclasses.fields(EngineOptions)]
    return EngineOptions(**given(args, names) | gpu_fields(args))


def sampling_fields(args: argparse.Namespace) -> dict[str, object]:
    """The fields of SamplingParams that were given."""
    fields = given(args, [field.name for field in dataclasses.fields(SamplingParams)])
    if fields.get("seed") == -1:
        del fields["seed"]
    if "temperature" in fields:
        fields["temperature"] = max(fields["temperature"], 0.0)
    if "dry_sequence_breakers" in fields:
        breakers = fields["dry_sequence_breakers"]
        fields["dry_sequence_breakers"] = () if "none" in breakers else tuple(map(_unescaped, breakers))
    return fields


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """The sampler's settings, defaults included."""
    return dataclasses.replace(SamplingParams(), **sampling_fields(args))  # type: ignore[arg-type]


def server_options(args: argparse.Namespace) -> ServerOptions:
    """The server's wishes. Raises OptionError for a key file that cannot be read or half a TLS pair."""
    fields = given(args, [field.name for field in dataclasses.fields(ServerOptions)])
    keys = [key for group in args.api_key or [] for key in group]
    if args.api_key_file is not None:
        lines = _text_of(args.api_key_file, "--api-key-file").splitlines()
        keys += [line for line in lines if line and not line.startswith("#")]
    if args.ui:
        log.warning("--ui has no effect: there is no web page yet")
    if (args.ssl_key_file is None) != (args.ssl_cert_file is None):
        raise OptionError("TLS needs both --ssl-key-file and --ssl-cert-file")
    return ServerOptions(**fields, api_keys=tuple(keys), default_sampling=sampling_fields(args))


def _text_of(path: Path, flag: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise OptionError(f"{flag} {path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise OptionError(f"{flag} {path}: is not UTF-8 text") from None


def _unescaped(text: str) -> str:
    r"""The escapes \n, \r, \t, \', \", \\ of a command line."""
    for code, character in (("\\n", "\n"), ("\\r", "\r"), ("\\t", "\t"), ("\\'", "'"), ('\\"', '"')):
        text = text.replace(code, character)
    return text.replace("\\\\", "\\")
