"""Reports of a batch: on the terminal, as files and as a page."""
