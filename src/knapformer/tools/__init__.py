"""One folder a tool: its reading, computing, page and command. The first line of a folder's docstring is its help."""
