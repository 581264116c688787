"""The sampler chain, in llama.cpp's order and by its formulas. numpy only; the engine owns one `Sampler` a request.

`chain` is the public `Sampler`, `candidates` what the steps work on, `steps` the stateless ones, `penalties` and `dry`
those that look at earlier tokens, `mirostat` the two that choose by themselves, `checks` the ranges of parameters.
"""

from freetoken.sampler.chain import SampledToken, Sampler, Vocabulary
from freetoken.sampler.checks import check_params

__all__ = ["SampledToken", "Sampler", "Vocabulary", "check_params"]
