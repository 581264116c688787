"""Generators, benchmarks and converters; each runs as `python tools/NAME.py` and imports as `tools.NAME`."""
