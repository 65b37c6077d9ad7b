"""The command line: the only place that prints. One file per command; `launch` starts ranks."""
