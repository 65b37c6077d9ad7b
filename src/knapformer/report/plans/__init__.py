"""Pictures of a plan: as an image, an interactive page, and an animation."""

from knapformer.report.plans.animation import animate_plan
from knapformer.report.plans.page import write_plan_page
from knapformer.report.plans.picture import draw_plan
from knapformer.report.plans.view import PlanView

__all__ = ["PlanView", "animate_plan", "draw_plan", "write_plan_page"]
