"""What is shown, filed and quoted of what workers write: the rules without processes, then real workers."""

from __future__ import annotations

import io
import os
import re
import threading
from pathlib import Path

import pytest

from drivetrain.config import load_config
from drivetrain.config.schema import OutputConfig
from drivetrain.errors import ConfigError
from drivetrain.launch.output import TAIL, Route, Stream, check, describe, routes

INHERITED = Route(shown=True, prefixed=False, filed=False)
PREFIXED = Route(shown=True, prefixed=True, filed=False)
HIDDEN = Route(shown=False, prefixed=False, filed=False)
FILED = Route(shown=False, prefixed=False, filed=True)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        # by rank 0 and 1, stdout then stderr of each
        ({}, [INHERITED, INHERITED, HIDDEN, HIDDEN]),
        ({"local_ranks_filter": "all"}, [PREFIXED] * 4),
        ({"local_ranks_filter": [1]}, [HIDDEN, HIDDEN, INHERITED, INHERITED]),
        ({"tee": 3}, [PREFIXED] * 4),
        ({"tee": "0"}, [INHERITED, INHERITED, HIDDEN, HIDDEN]),
        ({"tee": "1:2"}, [PREFIXED, PREFIXED, PREFIXED, PREFIXED]),
        ({"tee": "3", "local_ranks_filter": "0"}, [PREFIXED, PREFIXED, HIDDEN, HIDDEN]),
        ({"log_dir": "logs"}, [Route(True, False, True), Route(True, False, True), FILED, FILED]),
        ({"log_dir": "logs", "redirects": 3}, [FILED] * 4),
        ({"log_dir": "logs", "redirects": "1:3"}, [INHERITED, INHERITED, FILED, FILED]),
        ({"log_dir": "logs", "redirects": "2"}, [INHERITED, FILED, HIDDEN, FILED]),
        ({"log_dir": "logs", "tee": 3}, [Route(True, True, True)] * 4),
    ],
)
def test_where_each_stream_goes(given, expected):
    config = OutputConfig(**given)
    assert [route for both in routes(config, 2) for route in both] == expected


def test_of_several_machines_the_one_with_rank_0_shows_it():
    for config, shown in ((OutputConfig(), HIDDEN), (OutputConfig(local_ranks_filter=[0]), INHERITED)):
        assert routes(config, 2, first_rank=0)[0] == (INHERITED, INHERITED)
        assert routes(config, 2, first_rank=2)[0] == (shown, shown)
    assert describe(OutputConfig(), 1, 1).startswith("Output of no rank of this machine is shown")


def test_mistakes_about_output_name_the_key_and_the_cure(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("output: {tee: 4, redirects: 7, local_ranks_filter: first}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(file, environ={})
    assert str(caught.value).count("write 0 (none), 1 (stdout), 2 (stderr) or 3 (both)") == 2
    assert "output.local_ranks_filter" in str(caught.value)
    with pytest.raises(ConfigError, match="redirects needs a folder; set log_dir"):
        load_config(overrides={"output.redirects": "3"}, environ={})
    with pytest.raises(ConfigError, match="local rank 2 is named, but this machine has 2"):
        check(OutputConfig(tee="2:3"), 2)
    with pytest.raises(ConfigError, match=r"cannot hold files: File exists\. Name a folder"):
        check(OutputConfig(log_dir=str(file)), 2)


def test_what_is_not_seen_is_said():
    assert describe(OutputConfig(), 1) == ""
    assert describe(OutputConfig(local_ranks_filter="all"), 2) == ""
    assert describe(OutputConfig(), 2).startswith("Output of rank 0 is shown; --local_ranks_filter all")
    assert describe(OutputConfig(local_ranks_filter=[1]), 2, 1).startswith("Output of rank 3 is shown; ")
    assert describe(OutputConfig(redirects=3, log_dir="logs"), 2).startswith("Output of no rank of this machine is")
    assert describe(OutputConfig(tee=3, log_dir="logs"), 2) == "Output is filed in logs."


def stream(rank, seen, **kept):
    shown = io.StringIO()
    return Stream(rank, f"[rank{rank}] ", shown, kept.get("file"), seen), shown


def test_lines_have_their_rank_in_front_and_bars_show_their_last_state():
    one, shown = stream(1, None)
    for piece in (b"a", b"b\nc\n\r 1%\r 2%\r", b"100%\r\nend \xff"):
        one.feed(piece)
    one.finish()
    assert shown.getvalue() == "[rank1] ab\n[rank1] c\n[rank1] 100%\n[rank1] end \ufffd\n"


def test_a_warning_is_shown_by_one_rank_and_remembered_by_all():
    seen = {}
    (first, shown), (second, also) = stream(0, seen), stream(1, seen)
    warning = b"/a/train.py:3: UserWarning: careful\n  warnings.warn('careful')\n"
    first.feed(warning)
    second.feed(warning + b"own words\n  indented words\nother.py:1: FutureWarning: soon\n")
    first.feed(warning)
    assert shown.getvalue().count("UserWarning: careful") == 2  # it repeats itself: the script wants it so
    assert also.getvalue() == "[rank1] own words\n[rank1]   indented words\n[rank1] other.py:1: FutureWarning: soon\n"
    assert "careful" in second.tail[0]


def test_a_stream_without_line_ends_does_not_fill_the_memory():
    one, _ = stream(0, None)
    for _ in range(100):
        one.feed(b"x" * 10_000)
    one.finish()
    assert len(one.tail) == 1
    assert len(one.tail[0]) < 30_000
    for number in range(2 * TAIL):
        one.feed(b"%d\n" % number)
    assert list(one.tail) == [str(number) for number in range(TAIL, 2 * TAIL)]


def test_who_has_seen_enough_does_not_end_the_run(tmp_path):
    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    one = Stream(0, "", Closed(), tmp_path / "all.log", None)
    one.feed(b"a\nb\n")
    one.finish()
    assert (tmp_path / "all.log").read_bytes() == b"a\nb\n"


def test_a_full_disk_is_told_once_and_ends_nothing(capsys):
    one = Stream(0, "", None, Path("/dev/full"), None)
    one.feed(b"a\n")
    one.feed(b"b\n")
    assert capsys.readouterr().err == "warning: no more is written to /dev/full: [Errno 28] No space left on device\n"
    assert list(one.tail) == ["a", "b"]


def test_everything_is_read_before_the_end():
    lock, streams = threading.Lock(), [stream(rank, None) for rank in range(3)]
    files = [os.fdopen(one.connect(lock), "w") for one, _ in streams]
    for file in files[:2]:  # nothing is ever written to the third
        file.write("x\n" * 10_000)
        file.flush()
    files[1].close()
    for one, _ in streams:
        one.join(0.5)  # while the first is still open, as when a worker leaves a process behind
    assert [shown.getvalue().count("\n") for _, shown in streams] == [10_000, 10_000, 0]
    files[0].write("too late\n")
    for file in files:
        file.close()
    for one, shown in streams:
        one._thread.join(10)
        assert "too late" not in shown.getvalue()


SPEAK = """
    import os, sys, warnings
    rank = os.environ["RANK"]
    print("out", rank, sys.stdout.isatty())
    print("err", rank, file=sys.stderr)
    warnings.warn("once")
"""


def test_rank_0_alone_is_shown_and_nothing_stands_in_front(launch, script):
    done = launch("num_processes=2", script(SPEAK))
    assert (done.returncode, done.stdout) == (0, "out 0 False\n")
    assert "err 0\n" in done.stderr
    assert "err 1" not in done.stderr
    assert done.stderr.count("UserWarning: once") == 1


def test_all_ranks_with_their_number_and_a_file_for_each_stream(launch, script, tmp_path):
    done = launch("num_processes=2 output.tee=3 output.log_dir=logs output.role=worker", script(SPEAK))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[worker0] out 0 False", "[worker1] out 1 False"]
    assert sorted(re.findall(r"(?m)^\[worker.\] err .$", done.stderr)) == ["[worker0] err 0", "[worker1] err 1"]
    assert done.stderr.count("UserWarning: once") == 1
    files = {path.name: path.read_text() for path in tmp_path.glob("logs/*/start_0/*")}
    assert sorted(files) == [f"rank_{rank}.{name}.log" for rank in (0, 1) for name in ("stderr", "stdout")]
    assert files["rank_1.stdout.log"] == "out 1 False\n"
    assert all(files[f"rank_{rank}.stderr.log"].count("UserWarning: once") == 1 for rank in (0, 1))


def test_a_failing_rank_that_nobody_saw_is_quoted(launch, script):
    path = script("""
        import os, sys, time
        if os.environ["RANK"] == "1":
            print("quiet", flush=True)
            for number in range(100):
                print("line", number, file=sys.stderr)
            os.abort()
        time.sleep(50)
    """)
    done = launch("num_processes=2", path)
    assert done.returncode == 134
    assert "quiet" not in done.stdout
    quoted = [line for line in done.stderr.splitlines() if line.startswith("  line")]
    assert quoted == [f"  line {number}" for number in range(100 - TAIL, 100)]
    assert "rank 1 wrote to stderr, in the end:\n" in done.stderr
    assert done.stderr.index("  line 99\n") < done.stderr.index("rank 1 failed: ended by signal 6 (SIGABRT)")


def test_a_restart_says_who_failed_though_nobody_saw_that_rank(launch, script):
    path = script("""
        import os, sys, time
        if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            print("beforehand", file=sys.stderr)
            raise RuntimeError("the first time")
        if os.environ["RANK"] == "1":
            raise RuntimeError("the second time")
        time.sleep(50)
    """)
    done = launch("num_processes=2 max_restarts=1", path)
    assert done.returncode == 1
    assert "rank 1 wrote to stderr, in the end:\n  beforehand\nTraceback" in done.stderr
    first, again, second = done.stderr.partition("the workers are started again: restart 1 of 1\n")
    assert again
    assert "\nrank 1 failed: RuntimeError: the first time" in first
    assert "rank 1 failed: RuntimeError: the second time (exit code 1)" in second
    assert "the first time" not in second
