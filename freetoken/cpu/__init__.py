"""The two implementations of `blocks.Ops` that need no GPU."""
