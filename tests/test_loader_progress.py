"""The line that a person sees while nothing else is written: on terminals, and gone in the end."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import re
import sys
from pathlib import Path
from typing import Any, TextIO

import loader_fake
import pytest
from zerolayer.runtime_stub import progress
from zerolayer.runtime_stub.cli import main
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

    limits = Limits(max_tokens=chunk, max_seqs=4, max_logit_rows=4, max_context=256, block_size=4)
    scheduler = Scheduler(limits, 128, step)
    return scheduler, [scheduler.add([1] * n, max_new_tokens=3) for n in prompts]


def seen(capsys: Any) -> list[str]:
    return [text for text in capsys.readouterr().err.split(GONE) if text]


def write_token(_sequence: object, token: int) -> None:
    sys.stderr.write(f"<{token}>")


@pytest.mark.parametrize("chunk", [64, 512])
def test_a_long_prompt_is_counted_from_its_first_step_on(
    capsys: Any, clock: list[float], chunk: int
) -> None:
    scheduler, sequences = scheduler_of(129, chunk=chunk)
    sequences[0].on_token = write_token
    line = progress.Progress(sequences, True)
    while not scheduler.idle:
        line.update()
        scheduler.step()
        clock[0] += 0.3
    line.clear()
    read = [0, 64, 128] if chunk == 64 else [0]
    counted = [f"{GONE}{n} of 129 tokens of the prompt" for n in read]
    assert capsys.readouterr().err == "".join(counted) + GONE + "<7><7><7>"


def test_a_short_prompt_is_counted_after_half_a_second(capsys: Any, clock: list[float]) -> None:
    scheduler, sequences = scheduler_of(30)
    line = progress.Progress(sequences, True)
    shown = []
    while not scheduler.idle:
        line.update()
        shown.append(seen(capsys))
        scheduler.step()
        clock[0] += 0.3
    # steps of 8 tokens begin at 0, 0.3, 0.6 and 0.9 s; the fourth ends with the first token
    counted = [[f"{n} of 30 tokens of the prompt"] for n in (16, 24)]
    assert shown == [[], [], *counted, [], []]


def test_nothing_is_written_where_no_line_is(capsys: Any, clock: list[float]) -> None:
    scheduler, sequences = scheduler_of(20, chunk=64)
    sequences[0].on_token = write_token
    line = progress.Progress(sequences, True)
    while not scheduler.idle:
        line.update()
        scheduler.step()
    line.clear()
    assert capsys.readouterr().err == "<7><7><7>"


def test_answers_that_are_not_shown_are_counted(capsys: Any, clock: list[float]) -> None:
    scheduler, sequences = scheduler_of(3, 2)
    line = progress.Progress(sequences, False)
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
    progress.Progress(alone, False).update()
    assert seen(capsys) == []
    line = progress.Progress(alone, False)
    clock[0] = 4.0
    line.update()
    assert seen(capsys) == ["1 token"]


COMMANDS: list[tuple[list[str], bytes, str]] = [
    (["generate", "--tokens", "1,2,3"], b"", "0 of 3 tokens of the prompt"),
    (["generate", "--tokens", "1,2,3", "--no-stream"], b"", "0 of 3 tokens of the prompt"),
    (["chat"], b"hello\n", "0 of 6 tokens of the prompt"),  # five bytes and <user>
    (["verify"], b"", "hashes 100 %"),
]


@pytest.mark.parametrize(("command", "typed", "said"), COMMANDS, ids=lambda x: str(x)[:30])
def test_on_a_terminal_nothing_of_it_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str], typed: bytes, said: str
) -> None:
    """Both streams are one terminal: the line was there, and what stays is what a pipe gets."""
    artifact = loader_fake.build(tmp_path / "fake.zla")
    many = [] if command == ["verify"] else ["-n", "4", "--ignore-eos"]
    many = many[:2] if command == ["chat"] else many

    def run(out: TextIO, err: TextIO) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(typed)))
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", err)
        assert main([*command, *many], str(artifact)) == 0

    with monkeypatch.context():
        out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", newline="")
        run(out, io.StringIO())
        out.seek(0)
        plain = out.read()
    ours, theirs = pty.openpty()
    monkeypatch.setattr(progress, "_AFTER", 0)
    with os.fdopen(theirs, "w", encoding="utf-8", errors="replace") as terminal:
        run(terminal, terminal)
        monkeypatch.undo()
    found = b""
    with contextlib.suppress(OSError):  # EIO: nobody writes there any more, and all was read
        while more := os.read(ours, 1 << 16):
            found += more
    os.close(ours)
    written = found.decode(errors="replace").replace("\r\n", "\n")
    assert f"{GONE}{said}" in written
    left = re.sub(r"\r\x1b\[K[^\r]+(?=\r\x1b\[K)", "", written)
    assert left.count(GONE) >= 1 and plain
    digits = re.compile(r"[0-9.]+ GB/s")
    assert digits.sub("", left.replace(GONE, "")) == digits.sub("", plain)
