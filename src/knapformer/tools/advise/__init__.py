"""Say whether balancing is worth it for a data set, what to set, and what it will cost.

Reading order: `columns`, `engine`, `query`, `scan`, `histogram` (lengths from data); `buckets`, `memory`, `policies`
(what steps would be like); `sources`, `advice`, `verdict` (the answer); `page`, `command` (how it is shown).
"""
