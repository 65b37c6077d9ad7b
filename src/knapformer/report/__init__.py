"""Run records (JSON lines) and what is made from them: tables and figures. Reports read records, never logs."""

from knapformer.report.compare import Comparison, compare_runs, draw_comparison
from knapformer.report.records import RecordWriter, RunRecord, environment, read_records, write_records

__all__ = [
    "Comparison",
    "RecordWriter",
    "RunRecord",
    "compare_runs",
    "draw_comparison",
    "environment",
    "read_records",
    "write_records",
]
