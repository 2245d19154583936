"""The line that a person sees while nothing else is written: on terminals, and gone in the end."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import loader_fake
import pytest
from zerolayer.runtime_stub import progress
from zerolayer.runtime_stub.scheduler import Scheduler
from zerolayer.runtime_stub.step import Limits, StepBatch

GONE = "\r\x1b[K"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return now


def scheduler_of(*prompts: int, chunk: int = 8) -> tuple[Scheduler, list[Any]]:
    def step(batch: StepBatch) -> list[int]:
        return [7] * len(batch.rows)

    limits = Limits(max_tokens=chunk, max_seqs=4, max_logit_rows=4, max_context=64, block_size=4)
    scheduler = Scheduler(limits, 64, step)
    return scheduler, [scheduler.add([1] * n, max_new_tokens=3) for n in prompts]


def seen(capsys: Any) -> list[str]:
    return [text for text in capsys.readouterr().err.split(GONE) if text]


def test_a_long_prompt_is_counted_until_its_answer_comes(capsys: Any, clock: list[float]) -> None:
    scheduler, sequences = scheduler_of(30)
    line = progress.Progress(sequences, True, 8)
    shown = []
    while not scheduler.idle:
        clock[0] += 0.3
        scheduler.step()
        line.update()
        shown.append(seen(capsys))
    # 8 tokens after 0.3 s: too early; after 24 the next step writes the first token
    assert shown[:3] == [[], ["16 of 30 tokens of the prompt"], []]
    assert not any(shown[3:])


def test_the_line_goes_before_the_first_token(capsys: Any, clock: list[float]) -> None:
    scheduler, sequences = scheduler_of(20)
    line = progress.Progress(sequences, True, 8)
    clock[0] = 1.0
    scheduler.step()
    line.update()
    assert capsys.readouterr().err == f"{GONE}8 of 20 tokens of the prompt"
    scheduler.step()
    line.update()
    assert capsys.readouterr().err == GONE
    line.clear()
    assert capsys.readouterr().err == ""


def test_answers_that_are_not_shown_are_counted(capsys: Any, clock: list[float]) -> None:
    scheduler, sequences = scheduler_of(3, 2)
    line = progress.Progress(sequences, False, 8)
    clock[0] = 1.0
    for _ in range(3):
        scheduler.step()
        line.update()
        clock[0] += 0.09  # sooner than a tenth of a second later: every other one
    scheduler.cancel(sequences[1])
    clock[0] = 2.0
    line.update()
    first, *_, last = seen(capsys)
    assert first == "0 of 2 answers, 2 tokens" and last == "2 of 2 answers, 6 tokens"
    one, alone = scheduler_of(3)
    one.step()
    clock[0] = 3.0
    progress.Progress(alone, False, 8).update()
    assert seen(capsys) == []
    line = progress.Progress(alone, False, 8)
    clock[0] = 4.0
    line.update()
    assert seen(capsys) == ["1 token"]


def test_on_a_terminal_nothing_of_it_is_left(tmp_path: Path) -> None:
    """stderr is a terminal, stdout is not: the answer is only its own."""
    artifact = loader_fake.build(tmp_path / "fake.zla")
    ours, theirs = pty.openpty()
    command = [sys.executable, str(artifact), "generate", "--tokens", "1,2,3", "-n", "4", "--json"]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=theirs, text=True, timeout=60, check=False
    )
    os.close(theirs)
    os.set_blocking(ours, False)
    try:
        written = os.read(ours, 1 << 16).decode()
    except (BlockingIOError, OSError):
        written = ""
    os.close(ours)
    assert done.returncode == 0 and len(json.loads(done.stdout)["tokens"]) == 4
    assert re.sub(r"\r\x1b\[K[^\r]*(?=\r\x1b\[K)", "", written) in ("", GONE)
