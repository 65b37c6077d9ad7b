"""Draw a plan: picture, interactive page, animation or timeline.

Reading order: `view` (what is drawn), `style` (colours), `picture`, `page`, `animation`, `command`.
"""
