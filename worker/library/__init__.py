"""A sandbox in your own process, without a queue: the same engine, the same tools, driven by hand."""
