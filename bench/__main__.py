"""The comparison with every installed peer: ``python -m bench --peers DIR``.

In: the peers' folder that ``prepare.py`` filled.  Out: ``docs/performance.md`` (or a machine's own
page), the plot beside it, the raw results as JSON lines.  Next file: ``matrix.py``, then
``measure.py``.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

from bench import prompts
from bench.kernels import all_kernels
from bench.matrix import LINES, OURS, SUITES, Suite
from bench.measure import (
    ROOT,
    Place,
    build_ceilings,
    commit,
    compile_all,
    make_environment,
    measure,
    profile,
)
from bench.needs import need
from bench.plot import draw
from bench.report import write_readme, write_report
from bench.results import SUITE, Results, verdict
from bench.rounds import forget, require_same_commit
from bench.sweep import PREFIX, SWEEP
from bench.work import read_work

PROFILED = (("smollm2-2", "Q4_1", "SmolLM2-135M Q4_1"), ("tinyllama-2", "Q4_0", "1.1B Q4_0"))


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--peers", type=Path, required=True, help="folder of the peers' venvs")
    every = [*(s.name for s in SUITES), PREFIX]
    parser.add_argument("--suite", nargs="*", default=every, metavar="SUITE",
                        choices=[*every, *(s.name for s in SWEEP)],
                        help=f"default: all of {', '.join(every)}; {PREFIX} is all of "
                        f"{SWEEP[0].name} and the like")  # fmt: skip
    parser.add_argument("-n", "--rounds", type=int, default=5, help="processes of each system")
    parser.add_argument("--only", nargs="*", default=[], type=pattern, metavar="REGEX",
                        help="systems in whose name a REGEX is found, e.g. 'zerolayer Q4' BF16; "
                        "what others have measured is kept")  # fmt: skip
    parser.add_argument("--more", action="store_true",
                        help="add rounds to those that the results have of this commit, which are "
                        "otherwise measured anew")  # fmt: skip
    parser.add_argument("--results", type=Path, help="raw results, default DIR/results.jsonl")
    parser.add_argument("--machine", default="", metavar="NAME", choices=["", *machines()],
                        help="write performance-NAME.md, the page of another machine than the "
                        f"first: {', '.join(machines())}")  # fmt: skip
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="of the report")
    parser.add_argument("--no-verify", action="store_true", help="compile without the gate")
    parser.add_argument("--compile-only", action="store_true", help="prepare artifacts, then stop")
    parser.add_argument("--report-only", action="store_true", help="measure nothing")
    return parser.parse_args()


def machines() -> list[str]:
    """Those beside the first that have a page."""
    return sorted(p.stem.removeprefix("page-") for p in (ROOT / "bench").glob("page-*.md"))


def pattern(text: str) -> re.Pattern[str]:
    """An option's regular expression."""
    try:
        return re.compile(text)
    except re.error as e:
        raise argparse.ArgumentTypeError(f"{text!r}: {e}") from None


def chosen(options: argparse.Namespace) -> list[Suite]:
    """The suites that were asked for, each with the systems that were asked for, if any."""
    out = []
    for suite in (*SUITES, *SWEEP):
        systems = tuple(
            s
            for s in suite.systems
            if not options.only or any(one.search(s.name) for one in options.only)
        )
        asked = suite.name in options.suite or (suite in SWEEP and PREFIX in options.suite)
        if asked and systems:
            out.append(replace(suite, systems=systems))
    if not out:
        raise SystemExit("error: no suite has a system that --only finds")
    return out


def run(options: argparse.Namespace, place: Place) -> int:
    """Compile, measure; how many processes failed is left to the report."""
    place.artifacts.mkdir(parents=True, exist_ok=True)
    place.results.parent.mkdir(parents=True, exist_ok=True)
    suites = chosen(options)
    if options.more:
        require_same_commit(place.results, suites, commit())
    make_environment(place)
    prompts.write(place.peers / "models", suites)
    compile_all(place, [system for suite in suites for system in suite.systems])
    if options.compile_only:
        return 0
    if not options.more:
        forget(place.results, suites)
    ceilings = build_ceilings(place)
    for suite in suites:
        measure(place, suite, options.rounds, ceilings)
        for name, label, _title in PROFILED:
            for system in suite.systems:
                if suite.name == name and (system.peer, system.label) == (OURS, label):
                    if options.more and calls_file(place, name).exists():
                        continue  # of this commit, too
                    printed = profile(place, suite, system)
                    calls_file(place, name).write_text(json.dumps(printed), encoding="ascii")
    return 0


def calls_file(place: Place, suite: str) -> Path:
    """Where the suite's kernel times are kept."""
    return place.artifacts / f"{suite}.calls.json"


def report(place: Place, docs: Path, machine: str) -> None:
    """The page and the plot, from the results that are there; the README quotes the first
    machine's."""
    results = Results.read(place.results)
    ours = {s.artifact: s for suite in (*SUITES, *SWEEP) for s in suite.systems if s.peer == OURS}
    paths = {name: place.model(system) for name, system in ours.items()}
    works = {name: read_work(path) for name, path in paths.items() if path.exists()}
    profiles = {}
    for name, label, title in PROFILED:
        path = calls_file(place, name)
        suite = SUITE[name]
        artifact = next(s.artifact for s in suite.systems if (s.peer, s.label) == (OURS, label))
        if path.exists():
            printed = json.loads(path.read_text(encoding="ascii"))
            profiles[title] = (suite, artifact, printed)
    kernels = all_kernels(results, works, profiles)
    verdicts = [verdict(results, line, works) for line in LINES]
    ending = f"-{machine}" if machine else ""
    page = docs / f"performance{ending}.md"
    drawn = draw(results, verdicts, kernels, docs, ending)
    write_report(results, verdicts, works, kernels, page, drawn)
    if not machine and docs.resolve() == (ROOT / "docs").resolve():
        write_readme(results, verdicts, ROOT / "README.md")
    print(f"wrote {page}")


def main() -> int:
    options = arguments()
    if not options.compile_only:
        need("matplotlib")  # now, not after hours of measuring
    peers = options.peers.resolve()
    raw = (options.results or peers / "results.jsonl").resolve()
    place = Place(peers, raw, not options.no_verify)
    if not options.report_only:
        run(options, place)
    if not options.compile_only:
        options.docs.mkdir(parents=True, exist_ok=True)
        report(place, options.docs, options.machine)
    return 0


if __name__ == "__main__":
    sys.exit(main())
