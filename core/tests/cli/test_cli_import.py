"""``config import`` of files that are no good: what is wrong is said, in one line or with its place."""

from __future__ import annotations


def test_a_file_that_is_no_text_is_an_error_without_a_traceback(drivetrain, tmp_path):
    (tmp_path / "odd.yaml").write_bytes(b"\xff\xfe\x00")
    done = drivetrain("config", "import", "odd.yaml")
    assert done.returncode == 2
    assert done.stderr.startswith("error: the configuration file 'odd.yaml' cannot be read")
    assert "Traceback" not in done.stderr


def test_values_that_a_launch_would_refuse_are_told_with_their_place(drivetrain, tmp_path):
    (tmp_path / "odd.yaml").write_text("num_processes: two\nmixed_precision: bf17\nmachine_rank: -1\n")
    done = drivetrain("config", "import", "odd.yaml")
    assert done.returncode == 0, done.stderr
    assert "`drivetrain launch` stops with this file: odd.yaml:1:16: num_processes: expected a whole" in done.stdout
    assert "odd.yaml:2:18: mixed_precision: " in done.stdout
    assert "odd.yaml:3:15: machine_rank: expected at least 0, not -1" in done.stdout
    assert drivetrain("launch", "--config", "odd.yaml", "--print", __file__).returncode == 2


def test_a_good_file_and_an_empty_one_stop_nothing(drivetrain, tmp_path):
    (tmp_path / "empty.yaml").write_text("")
    (tmp_path / "good.yaml").write_text("num_processes: 2\nuse_cpu: true\nsame_network: true\n")
    for name in ("empty.yaml", "good.yaml"):
        done = drivetrain("config", "import", name)
        assert done.returncode == 0
        assert "stops" not in done.stdout
        assert done.stderr == ""
