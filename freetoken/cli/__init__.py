"""The command line: `ft serve`, `ft run`, `ft bench`, `ft info`."""
