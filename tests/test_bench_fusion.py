"""The fusion sweep's arithmetic on times made from a known model, and its models."""

from __future__ import annotations

import sys
from pathlib import Path

import gguf
import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
sys.path.append(str(ROOT / "bench" / "runners"))

import common  # noqa: E402

from bench import report_fusion, sweep_models  # noqa: E402
from bench.fit import Fit, fit  # noqa: E402
from bench.matrix import SUITES  # noqa: E402
from bench.results import Results, Stat  # noqa: E402
from bench.sweep import LEVELS, RUNS, SHAPES, SWEEP, Point, points, ratios  # noqa: E402
from bench.work import Call, Work  # noqa: E402

CALLS = {"conservative": 22, "balanced": 7, "aggressive": 7}
PRICE = {"conservative": 3.0, "balanced": 3.0, "aggressive": 0.5}  # microseconds a join
GBS = 25.0


def made(level: str, hidden: int, threads: int = 2) -> Point:
    """A point whose time is exactly its weights at 25 GB/s and the joins' prices."""
    shape = next(s for s in SHAPES if s.hidden == hidden)
    weights, activations = hidden**2, 10 * CALLS[level] * hidden
    us = weights / (1e3 * GBS) + CALLS[level] * PRICE[level]
    value = Stat(us, us, us, 5)
    return Point(shape, "Q4_0", level, threads, 1, value, value, value, CALLS[level], CALLS[level],
                 weights, activations)  # fmt: skip


@pytest.fixture
def found() -> list[Point]:
    return [made(level, s.hidden) for s in SHAPES for level in LEVELS]


def test_the_fit_finds_what_the_times_were_made_of(found: list[Point]) -> None:
    f = fit(found)
    assert f is not None
    assert (f.bandwidth, f.fork_us, f.stay_us) == pytest.approx((GBS, 3.0, 0.5))
    assert f.error < 1e-9 and f.n == len(found)
    small = made("conservative", 64)
    assert f.step_us(small.weight_bytes, small.joins, small.level) == pytest.approx(
        small.step_us.median
    )


def test_nothing_fitted_is_negative(found: list[Point]) -> None:
    """Calls that cost nothing at all, and some noise: no price below nothing."""
    free = [p for p in found if p.level == "aggressive"]
    for i, p in enumerate(free):
        us = p.weight_bytes / (1e3 * GBS) * (1 + 0.01 * (-1) ** i)
        object.__setattr__(p, "step_us", Stat(us, us, us, 5))
    f = fit(free)
    assert f is not None and f.stay_us >= 0 and f.fork_us == 0
    assert f.bandwidth == pytest.approx(GBS, rel=0.02)


def test_models_past_the_last_cache_are_not_fitted(found: list[Point]) -> None:
    large = Point(**{**vars(made("conservative", 2048)), "weight_bytes": 17 << 20})
    assert fit([*found, large]) == fit(found)


def test_too_few_sizes_are_not_fitted(found: list[Point]) -> None:
    assert fit([p for p in found if p.shape.hidden < 200][:4]) is None


def test_where_a_ratio_holds() -> None:
    f = Fit(GBS, 3.0, 0.5, 0.0, 15)
    most = f.bytes_for(2.3, 22, 7)
    # 7 x / 25e3 + 22 * 3 = 2.3 (7 x / 25e3 + 7 * 0.5)
    assert most == pytest.approx(25e3 * (22 * 3 - 2.3 * 3.5) / (1.3 * 7))
    assert f.ratio(most, 22, 7) == pytest.approx(2.3)
    assert f.ratio(2 * most, 22, 7) < 2.3 < f.ratio(most / 2, 22, 7)
    assert Fit(GBS, 1.0, 2.0, 0.0, 15).bytes_for(2.3, 22, 7) < 0


def test_ratios_compare_the_ends_of_the_same_model(found: list[Point]) -> None:
    slow, fast = made("conservative", 128), made("aggressive", 128)
    got = ratios(found)[128, "Q4_0", 2, 1]
    assert got == pytest.approx(slow.step_us.median / fast.step_us.median)
    assert ratios([slow]) == {}


def test_points_join_times_and_manifests() -> None:
    suite = next(s for s in SWEEP if s.name == "fusion-sweep-64-t2-b8")
    system = suite.systems[0]
    call = Call("layers", 1000, 60, 2000, False, False)
    work = Work((call, call), 64.0, "Q4_0", "conservative", 2)
    line = {"suite": suite.name, "system": system.name, "decode_s": 0.5}
    lines = [{**line, "round": i, "step_us": 10.0 + i, "prefill_us": 5.0} for i in range(3)]
    (p,) = points(Results(lines), {system.artifact: work})
    assert (p.kind, p.level, p.threads, p.batch) == ("Q4_0", "conservative", 2, 8)
    assert p.step_us == Stat(11.0, 10.0, 12.0, 3)
    assert p.decode.median == 8 * 128 / 0.5
    assert (p.weight_bytes, p.activation_bytes, p.joins) == (2000, 120, 2)


def test_the_page_says_where_it_holds(found: list[Point]) -> None:
    table = report_fusion.ratio_table(found)
    assert len(table) == 2 + len(SHAPES)
    small = ratios(found)[64, "Q4_0", 2, 1]
    assert small > 2.3 and f"**{small:.2f}x**" in table[3]
    large = ratios(found)[2048, "Q4_0", 2, 1]
    assert large < 2.3 and f" {large:.2f}x " in table[-1] and "**" not in table[-1]
    crossed = report_fusion.crossing(found)
    assert crossed is not None
    f = Fit(GBS, 3.0, 0.5, 0.0, 15)
    assert f.ratio(crossed, 22, 7) == pytest.approx(2.3, rel=0.3)  # between models far apart
    rows = report_fusion.fits_table(found, report_fusion.fits_of(found))
    assert rows[2].startswith("| 2 | 4-bit | 25.0 | 3.00 | 0.50 | 0 % | 159.2 KB |")
    fast = [p for p in found if p.shape.hidden < 300]
    assert report_fusion.crossing(fast) is None  # above everywhere
    slow = [p for p in found if p.shape.hidden > 2000]
    assert report_fusion.crossing(slow) == 0.0


def test_every_run_compares_all_levels_in_turn() -> None:
    assert len(SWEEP) == len(RUNS) * len(SHAPES)
    for suite in SWEEP:
        levels = [s.options[1] for s in suite.systems]
        assert levels == list(LEVELS) * (len(levels) // 3)
        assert "--steps" in suite.arguments()
        artifacts = [s.artifact for s in suite.systems]
        assert len(set(artifacts)) == len(artifacts)
    assert not {s.name for s in SWEEP} & {s.name for s in SUITES}


def test_the_runner_takes_a_suites_options(monkeypatch: pytest.MonkeyPatch) -> None:
    suite = next(s for s in SWEEP if s.name == "fusion-sweep-256-t4-b1")
    monkeypatch.setattr(sys, "argv", ["x", "--model=m", *suite.arguments()])
    given = common.arguments()
    assert (given.vocabulary, given.steps, given.threads, given.new) == (8192, True, 4, 128)


def test_the_models_are_what_the_shapes_say(tmp_path: Path) -> None:
    from zerolayer.compiler.frontends.gguf import load_gguf

    shape = next(s for s in SHAPES if s.hidden == 64)
    for kind in ("Q4_0", "F32"):
        path = tmp_path / f"{kind}.gguf"
        sweep_models.make(shape, kind, path)
        reader = gguf.GGUFReader(path)
        matrices = {t.name: t for t in reader.tensors if len(t.shape) == 2}
        assert {t.tensor_type.name for t in matrices.values()} == {kind}
        assert matrices["blk.4.ffn_down.weight"].shape.tolist() == [192, 64]  # columns first
        config = load_gguf(path).config
        assert config is not None
        assert (config.hidden_size, len(config.layers), config.n_kv_heads) == (64, 5, 2)


def test_prompts_stay_inside_a_small_vocabulary() -> None:
    ids = common.prompt_ids(500, 3, 4096)
    assert min(ids) >= 300 and max(ids) < 4096 and len(set(ids)) > 300
    assert common.prompt_ids(500, 3) != ids
