"""Seconds by phase, the table of them, and the trace of a profiled run."""

import json
import time

import torch

from ds_dflash.phases import TRACED, UNTRACED, Phases, Profiler, table


def test_seconds_of_a_phase_add_up_and_its_errors_pass_through():
    phases = Phases()
    for _ in range(3):
        with phases("forward"):
            time.sleep(0.01)
    assert phases.seconds["forward"] >= 0.03
    assert phases.next("read", iter([7])) == 7
    assert phases.next("read", iter([])) is None
    assert set(phases.seconds) == {"forward", "read"}


def test_the_table_gives_shares_of_the_whole_and_what_is_left():
    lines = table("drafter-0", {"step": 1.0, "forward": 2.5}, total=5.0, updates=10).splitlines()
    assert lines[0] == "drafter-0: 10 updates in 5.00 s"
    assert [line.split() for line in lines[2:]] == [
        ["forward", "2.50", "50.0%", "250.0"],
        ["step", "1.00", "20.0%", "100.0"],
        ["other", "1.50", "30.0%", "150.0"],
    ]


def test_a_profile_holds_a_table_and_a_trace_with_the_phases(tmp_path, capsys):
    phases = Phases(synchronizes=True)
    profiler = Profiler(tmp_path / "profile", "target-0", phases)
    for _ in range(UNTRACED + TRACED + 1):
        with phases("forward"):
            torch.ones(8) @ torch.ones(8)
        profiler.update_done()
    profiler.close()
    text = (tmp_path / "profile" / "target-0.txt").read_text()
    assert text.startswith(f"target-0: {UNTRACED + TRACED} updates")  # the first one warms up
    assert capsys.readouterr().out == text
    events = json.loads((tmp_path / "profile" / "target-0.trace.json").read_text())["traceEvents"]
    assert sum(event.get("name") == "forward" and event.get("cat") == "user_annotation" for event in events) == TRACED


def test_without_a_directory_nothing_is_written(tmp_path, capsys):
    profiler = Profiler(None, "target-0", Phases())
    profiler.update_done()
    profiler.close()
    assert capsys.readouterr().out == ""
