"""The CPU's two implementations of `blocks.Ops`: recorded native programs, and torch for long prompts."""
