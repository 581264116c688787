"""`ft run`: generate in the terminal, printing as it goes; with no prompt, a chat."""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
from collections.abc import Iterator

from freetoken.chat import ChatTemplate, load_template, prompt_tokens
from freetoken.cli.flags import (
    add_engine_flags,
    add_model_flags,
    add_sampling_flags,
    engine_options,
    model_options,
    sampling_params,
)
from freetoken.cli.loading import wait_while_loading
from freetoken.engine import Engine
from freetoken.errors import OptionError
from freetoken.gguf import open_model
from freetoken.request import DoneEvent, ErrorEvent, Request, SamplingParams, Timings, TokenEvent
from freetoken.spec import read_architecture
from freetoken.tokenizer import StreamDecoder, Tokenizer

with contextlib.suppress(ImportError):  # some Pythons are built without it
    import readline  # noqa: F401 - gives input() its line editing

__all__ = ["add_arguments", "run"]

logger = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `ft run`, spelled as llama-cli spells them."""
    add_model_flags(parser)
    add_engine_flags(parser)
    add_sampling_flags(parser)
    parser.add_argument("-p", "--prompt", help="the prompt; without it, a chat (or standard input where it is a pipe)")
    parser.add_argument("-sys", "--system-prompt", metavar="TEXT", help="a system message for the chat")
    template = parser.add_mutually_exclusive_group()
    template.add_argument(
        "-cnv", "--conversation", action="store_true", default=None, help="apply the chat template (default)"
    )
    template.add_argument(
        "-no-cnv",
        "--no-conversation",
        dest="conversation",
        action="store_false",
        help="continue the prompt as plain text",
    )


def run(args: argparse.Namespace) -> int:
    """Load, then answer one prompt or chat until the input ends."""
    is_chat = args.conversation is not False
    prompt = args.prompt
    if prompt is None and not sys.stdin.isatty():
        prompt = sys.stdin.read()
    if prompt is None and not is_chat:
        raise OptionError("-no-cnv needs a prompt: give one with -p")
    options = model_options(args)
    with open_model(options.path) as model:
        read_architecture(model.metadata)
        tokenizer = Tokenizer(model.shards[0].path, model.metadata)
    template = load_template(options.chat_template, tokenizer) if is_chat else None
    engine = Engine(options, engine_options(args), tokenizer)
    engine.start()
    try:
        show_loading(engine)
        params = sampling_params(args)
        if template is None:
            tokens = tokenizer.encode(prompt or "", add_special=True, parse_special=True)
            print_answer(answer_pieces(engine, tokenizer, tokens, params), [])
        else:
            converse(engine, tokenizer, template, params, args.system_prompt, prompt)
    finally:
        engine.close()
    return 0


def show_loading(engine: Engine) -> None:
    """A progress bar on a terminal until the engine is ready; raises what made loading fail."""
    wait_while_loading(engine)
    engine.wait_ready()


def converse(
    engine: Engine,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    params: SamplingParams,
    system_prompt: str | None,
    prompt: str | None,
) -> None:
    """Answer one prompt, or where there is none each line of the terminal, keeping the dialogue.

    In a chat an interrupt ends the answer, of which what was shown stays part of the dialogue.
    """
    messages: list[dict[str, object]] = []
    if system_prompt:
        messages.append({"role": "system", "content": system_prompt})
    for text in [prompt] if prompt is not None else typed_lines():
        messages.append({"role": "user", "content": text})
        tokens = prompt_tokens(tokenizer, template, messages)
        answer: list[str] = []
        try:
            print_answer(answer_pieces(engine, tokenizer, tokens, params), answer)
        except KeyboardInterrupt:
            if prompt is not None:
                raise
            print()
        messages.append({"role": "assistant", "content": "".join(answer)})


def typed_lines() -> Iterator[str]:
    """Lines typed by a person, until the end of input or an interrupt at the prompt."""
    print("Ctrl-C stops an answer, Ctrl-D ends the chat.", file=sys.stderr)
    while True:
        try:
            line = input("> ")
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if line.strip():
            yield line


def print_answer(pieces: Iterator[str], shown: list[str]) -> None:
    """Print an answer as it comes and end its line; `shown` keeps what was printed, also where this is interrupted."""
    for piece in pieces:
        shown.append(piece)
        sys.stdout.write(piece)
        sys.stdout.flush()
    print(flush=True)


def answer_pieces(engine: Engine, tokenizer: Tokenizer, tokens: list[int], params: SamplingParams) -> Iterator[str]:
    """Generate from prompt tokens: the text piece by piece. Raises what the engine reports; cancels when it is left."""
    request = Request(tuple(tokens), params)
    engine.submit(request)
    decoder = StreamDecoder(tokenizer)
    try:
        while True:
            event = request.events.get()
            if isinstance(event, TokenEvent):
                yield decoder.push(event.token)
            elif isinstance(event, ErrorEvent):
                raise event.error
            elif isinstance(event, DoneEvent):
                yield decoder.flush()
                log_timings(event.timings)
                return
    except BaseException:
        request.cancelled.set()
        raise


def log_timings(timings: Timings) -> None:
    """One line of speeds, for -v."""
    prompt_rate = timings.prompt_n / timings.prompt_ms * 1e3 if timings.prompt_ms else 0.0
    rate = timings.predicted_n / timings.predicted_ms * 1e3 if timings.predicted_ms else 0.0
    logger.info(
        "prompt %d tokens (%d reused), %.1f tok/s; generated %d tokens, %.1f tok/s",
        timings.prompt_n,
        timings.cache_n,
        prompt_rate,
        timings.predicted_n,
        rate,
    )
