"""Time and memory of `knapformer advise`: on a generated Parquet manifest, and on real sizes where they are at hand.

    python -m benchmarks.advise                      # 20 million rows
    python -m benchmarks.advise --rows 1000000
    python -m benchmarks.advise --data FOLDER        # and 5,000 real images with 20,000 real clips

The command runs in a child process, whose peak resident memory the system reports. The manifest is generated in another
one, in a temporary folder. FOLDER holds `coco_val2017_sizes_captionlens.csv` (COCO val2017: sizes and captions of 5,000
images), `activitynet_captions_segments.csv.gz` (ActivityNet Captions: length of described segments) and
`youtube_video_sizes_avakinetics.csv` (sizes of web videos with their frequency); clips get a size by that frequency.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import make_parser

from knapformer.report import RecordWriter

FIGURES = ("computing", "waiting", "traffic", "step_seconds", "speedup_of_balancing")

GENERATE = """
import duckdb
duckdb.sql("SET enable_progress_bar = false")
duckdb.sql('''COPY (
    SELECT CASE WHEN i % 1000003 = 7 THEN -1 ELSE (random() * 1500 + 100)::INT END AS width,
           (random() * 1500 + 100)::INT AS height,
           CASE WHEN random() < 0.6 THEN 1 ELSE (random() * 240 + 1)::INT END AS num_frames,
           24.0 AS fps, (random() * 200)::INT AS caption_tokens
    FROM range({rows}) t(i)) TO '{file}' (FORMAT parquet)''')
"""
REAL = """
import duckdb
duckdb.sql("SET enable_progress_bar = false")
duckdb.sql("SET threads = 1")
duckdb.sql("SELECT setseed(0.5)")
duckdb.sql('''COPY (
    WITH sizes AS (SELECT width, height, sum(count) OVER (ORDER BY width, height ROWS UNBOUNDED PRECEDING) AS upto
                   FROM read_csv('{folder}/youtube_video_sizes_avakinetics.csv')),
         clips AS (SELECT segment_seconds AS duration, caption_clip_tokens,
                          random() * (SELECT max(upto) FROM sizes) AS at
                   FROM read_csv('{folder}/activitynet_captions_segments.csv.gz')
                   USING SAMPLE reservoir(20000 ROWS) REPEATABLE (1))
    SELECT width, height, duration, 24.0 AS fps, caption_clip_tokens
    FROM clips ASOF JOIN sizes ON clips.at <= sizes.upto) TO '{file}' ''')
"""


def measure(arguments: list[str]) -> dict[str, Any]:
    """Run `knapformer advise` in a child; its answer, wall and CPU time [s] and peak memory [byte]."""
    start = time.perf_counter()
    child = subprocess.Popen([sys.executable, "-m", "knapformer", "advise", *arguments, "--json"],
                             stdout=subprocess.PIPE)  # fmt: skip
    assert child.stdout is not None  # noqa: S101
    output = child.stdout.read()
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"advise failed with status {child.returncode}")
    found = json.loads(output)
    return {
        "seconds": time.perf_counter() - start,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "peak_resident_bytes": usage.ru_maxrss * 1024,
        "rows": found["source"]["rows"],
        "bad_rows": found["source"]["bad_rows"],
        "verdict": found["verdict"],
        "policies": {policy["name"]: {figure: policy[figure] for figure in FIGURES} for policy in found["policies"]},
    }


def main() -> None:
    parser = make_parser(__doc__, "advise.jsonl")
    parser.add_argument("--rows", type=int, default=20_000_000, help="0: none are generated")
    parser.add_argument("--data", type=Path, help="folder of real sizes")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs: dict[str, list[str]] = {}
        if options.rows:
            file = Path(folder) / "generated.parquet"
            subprocess.run([sys.executable, "-c", GENERATE.format(rows=options.rows, file=file)], check=True)
            runs[f"generated-{options.rows}"] = [str(file)]
        if options.data is not None:
            clips = Path(folder) / "clips.csv"
            subprocess.run([sys.executable, "-c", REAL.format(folder=options.data, file=clips)], check=True)
            limits = ["--sample-fps", "16", "--max-frames", "129", "--max-pixels", "921600"]
            images = options.data / "coco_val2017_sizes_captionlens.csv"
            runs["real-25000"] = [str(images), str(clips), "--column", "text=clip_tokens_first", *limits]
        for name, arguments in runs.items():
            shown = [Path(a).name if os.sep in a else a for a in arguments]
            found = measure(arguments)
            config = {"arguments": shown, "defaults": "hunyuanvideo on h100x32"}
            with RecordWriter(options.output, name, config) as record:
                record.step(0, **found)
            memory = found["peak_resident_bytes"] / 1e9
            times = f"{found['seconds']:.1f} s ({found['cpu_seconds']:.1f} s of CPU)"
            print(f"{name}: {times}, {memory:.2f} GB peak, {found['rows']:,} rows")


if __name__ == "__main__":
    main()
