"""Chat messages to prompt text, as llama.cpp does it. Knows the vocabulary only where tokens are asked for.

`environment` is jinja2's sandbox with what templates expect, `messages` reads and adapts messages, `abilities` finds
out what a template can do, `template` renders, `builtin` holds the templates that have a name, `load` chooses one.
"""

from freetoken.chat.builtin import BUILTIN_NAMES
from freetoken.chat.load import load_template, prompt_tokens
from freetoken.chat.messages import read_messages
from freetoken.chat.template import ChatTemplate

__all__ = ["BUILTIN_NAMES", "ChatTemplate", "load_template", "prompt_tokens", "read_messages"]
