"""The CPU's two implementations of `blocks.Ops`: recorded programs, and native products with torch for long prompts."""
